"use strict";
// An answer's Markdown as elements: markdown-it reads it, DOMPurify cleans the HTML that it writes, and what is
// shown grows with the answer. HTML within the Markdown is text.

const MOST_LEVELS = 20;  // lists and quotes within one another; deeper text is a paragraph

const markdown = markdownit({linkify: true, breaks: true});
markdown.use(mathRules);
markdown.linkify.set({fuzzyLink: false, fuzzyEmail: false});  // "main.py" is not an address in Paraguay
markdown.validateLink = address => /^(https?:|mailto:)/i.test(address);
markdown.block.ruler.before("table", "deep", (state, line, end, silent) => {
  if (state.level < MOST_LEVELS || silent) return false;
  state.push("paragraph_open", "p", 1);
  const content = state.getLines(line, end, state.blkIndent, false).trim();
  Object.assign(state.push("inline", "", 0), {content, children: []});
  state.push("paragraph_close", "p", -1);
  state.line = end;
  return true;
});
markdown.core.ruler.push("page", ({tokens}) => {
  tokens.forEach((token, i) => {
    // An answer's headings are below the page's own.
    if (token.type.startsWith("heading")) token.tag = "h" + Math.min(6, Number(token.tag[1]) + 2);
    const align = /text-align:(\w+)/.exec(token.attrGet("style") || "");
    if (align) token.attrs = [["class", align[1]]];  // the page's policy forbids styles
    const item = tokens[i - 2];
    if (token.type === "inline" && item?.type === "list_item_open") readBox(token.children[0], item);
  });
});
Object.assign(markdown.renderer.rules, {
  table_open: () => '<div class="table"><table>',
  table_close: () => "</table></div>",
  // The page loads nothing from elsewhere: a picture is a link to it.
  image: (tokens, i) => {
    const source = markdown.utils.escapeHtml(tokens[i].attrGet("src"));
    return `<a href="${source}">${markdown.utils.escapeHtml(tokens[i].content) || source}</a>`;
  },
});

const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "pre", "code", "em",
    "strong", "s", "a", "div", "span", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "title", "class", "start"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** "[ ] " and "[x] " at the beginning of a list's item are boxes, in the place of its bullet. */
function readBox(text, item) {
  const [all, mark] = (text?.type === "text" && /^\[([ xX])\] /.exec(text.content)) || [];
  if (!all) return;
  text.content = (mark === " " ? "☐ " : "☑ ") + text.content.slice(all.length);
  item.attrSet("class", "task");
}

/** Shows a text in `body`. Called again with more of the text, it leaves what was finished as it is. */
function showMarkdown(body, text) {
  const blocks = htmlOfBlocks(text);
  blocks.forEach((html, i) => {
    if (body.children[i]?.html === html) return;
    const fresh = DOMPurify.sanitize(html, ALLOWED).firstElementChild || make("p");
    showNode(body, body.children[i], fresh).html = html;
  });
  while (body.children.length > blocks.length) body.lastElementChild.remove();
}

/** The HTML of each block of a text. */
function htmlOfBlocks(text) {
  // A last line of one or two such marks begins a fence, a rule or an item, and is not yet what it will be.
  const settled = text.replace(/\n[ \t]*([`~=-])\1?$/, ""), env = {}, blocks = [];
  const tokens = markdown.parse(settled, env);
  let begin = 0;
  tokens.forEach((token, i) => {
    if (token.level || token.nesting > 0) return;  // within a block, or its beginning
    blocks.push(markdown.renderer.render(tokens.slice(begin, i + 1), markdown.options, env));
    begin = i + 1;
  });
  return blocks;
}

/** Makes the children of `parent` show what `fresh` are. */
function showNodes(parent, fresh) {
  fresh.forEach((node, i) => showNode(parent, parent.childNodes[i], node));
  while (parent.childNodes.length > fresh.length) parent.lastChild.remove();
}

/** Shows `fresh` in the place of `old`, which stays if it is of the same kind. Returns the node that is shown. */
function showNode(parent, old, fresh) {
  if (old?.source.isEqualNode(fresh)) return old;
  const shell = node => node.cloneNode(false), stays = old && isOneKind(shell(old.source), shell(fresh));
  const node = stays ? old : nodeOf(fresh);
  node.source = fresh;
  node.show(fresh);
  if (!old) parent.append(node);
  else if (!stays) old.replaceWith(node);
  return node;
}

function isOneKind(a, b) {
  return a.isEqualNode(b) || (a.nodeType === Node.TEXT_NODE && b.nodeType === Node.TEXT_NODE);
}

/** A node that is filled, and later grows, by its method show(fresh). */
function nodeOf(fresh) {
  if (fresh.nodeType === Node.TEXT_NODE) {
    const text = document.createTextNode("");
    text.show = ({data}) => {
      if (!data.startsWith(text.data)) text.data = "";
      text.appendData(data.slice(text.length));
    };
    return text;
  }
  if (fresh.localName === "pre") {
    const block = codeBlock(), {show} = block;
    block.show = ({firstChild: code}) => {
      const language = code.className.replace("language-", "").toLowerCase();
      show({language, text: code.textContent.replace(/\n$/, "")});
    };
    return block;
  }
  const element = fresh.cloneNode(false);
  if (fresh.localName === "a") Object.assign(element, {target: "_blank", rel: "noopener noreferrer"});
  element.show = fresh.classList.contains("math")
    ? ({textContent}) => { element.textContent = textContent; drawMath(element); }
    : ({childNodes}) => showNodes(element, [...childNodes]);
  return element;
}
