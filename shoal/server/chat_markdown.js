"use strict";
// Markdown, the common part of it, as elements. Everything becomes elements and text nodes: no text that a
// model or a person wrote is ever read as HTML.

// Lengths are bounded: a model that says "[" ten thousand times must not cost the square of that.
const CODE = /(?<!`)(`{1,3})(?!`)(.{1,1000}?)(?<!`)\1(?!`)/;
const BOLD = /\*\*(?=\S)(.{0,1000}?\S)\*\*/;
const ITALIC = /(?<![\w*])\*(?=[^\s*])([^*]{0,1000}[^\s*])\*(?!\*)/;
const LINK = /\[([^\][]{1,300})\]\((https?:\/\/[^\s()]{1,2000})\)/;
const ADDRESS = /(\bhttps?:\/\/[^\s<>()"'`*]{0,2000}[^\s<>()"'`*.,;:!?])/;
const INLINE = new RegExp([CODE, BOLD, ITALIC, LINK, ADDRESS].map(part => part.source).join("|"), "g");

/** The nodes of a line's text. */
function inline(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [all, , code, bold, italic, label, url, address] = found;
    nodes.push(text.slice(end, found.index));
    end = found.index + all.length;
    if (code !== undefined) nodes.push(make("code", "", code));
    else if (bold !== undefined) nodes.push(make("strong", "", ...inline(bold)));
    else if (italic !== undefined) nodes.push(make("em", "", ...inline(italic)));
    else nodes.push(link(label || address, url || address));
  }
  return [...nodes, text.slice(end)];
}

function link(label, url) {
  return Object.assign(make("a", "", label), {href: url, target: "_blank", rel: "noopener noreferrer"});
}

// A quote within more than twenty others is text, for a line of ">" alone must not exhaust the stack.
const QUOTE = /^>(?!(\s?>){20})\s?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/, HEADING = /^(#{1,6})\s+(.*)$/;
const FENCE = /^\s*(```+|~~~+)\s*([^\s`]*)/, RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** The blocks of a text in order: {kind, source, ...}, `source` the lines that it was read from. */
function blocksOf(text) {
  const lines = text.split("\n"), blocks = [];
  for (let i = 0; i < lines.length;) {
    const block = lines[i].trim() ? blockAt(lines, i) : null, end = block ? block.end : i + 1;
    if (block) blocks.push({...block, source: lines.slice(i, end).join("\n")});
    i = end;
  }
  return blocks;
}

/** The block that begins at line `start`, which is not empty; `end` is the first line behind it. */
function blockAt(lines, start) {
  const line = lines[start], fence = FENCE.exec(line), heading = HEADING.exec(line);
  const endOf = goesOn => {
    let i = start + 1;
    while (i < lines.length && goesOn(i)) i++;
    return i;
  };
  if (fence) {
    const closing = endOf(i => !lines[i].trim().startsWith(fence[1]));
    // While the fence is open, a last line that is empty or begins like the closing fence is not code yet.
    const isCut = closing === lines.length && fence[1].startsWith(lines[closing - 1].trim());
    const text = lines.slice(start + 1, isCut ? closing - 1 : closing).join("\n");
    const end = Math.min(closing + 1, lines.length);
    return {kind: "code", language: fence[2].toLowerCase(), text, end};
  }
  if (heading) {
    const text = heading[2].replace(/\s#+\s*$/, "");
    return {kind: "heading", level: heading[1].length, text, end: start + 1};
  }
  if (RULE.test(line)) return {kind: "rule", end: start + 1};
  if (QUOTE.test(line)) {
    const end = endOf(i => QUOTE.test(lines[i]));
    const rows = lines.slice(start, end).map(row => row.replace(QUOTE, ""));
    return {kind: "quote", text: rows.join("\n"), end};
  }
  if (ITEM.test(line)) {
    const belongs = row => ITEM.test(row) || /^\s+\S/.test(row);
    const end = endOf(i => belongs(lines[i]) || (!lines[i].trim() && belongs(lines[i + 1] ?? "")));
    return {kind: "list", mark: ITEM.exec(line)[2], lines: lines.slice(start, end), end};
  }
  if (isTable(lines, start)) {
    const end = endOf(i => lines[i].includes("|"));
    return {kind: "table", lines: lines.slice(start, end), end};
  }
  const others = [FENCE, HEADING, RULE, QUOTE, ITEM];
  const isOther = i => others.some(other => other.test(lines[i])) || isTable(lines, i);
  const end = endOf(i => lines[i].trim() && !isOther(i));
  return {kind: "text", lines: lines.slice(start, end), end};
}

function isTable(lines, i) {
  return lines[i].includes("|") && lines[i + 1]?.includes("-") && TABLE_RULE.test(lines[i + 1]);
}

/** A list's items as blocks; rows that are indented further than the first belong to the item before them. */
function itemsOf(rows) {
  const depth = ITEM.exec(rows[0])[1].length, items = [];
  const beginsItem = row => ITEM.test(row) && ITEM.exec(row)[1].length <= depth;
  for (let i = 0; i < rows.length;) {
    const first = i++;
    while (i < rows.length && !beginsItem(rows[i])) i++;
    const lines = rows.slice(first, i);
    items.push({kind: "item", lines, source: lines.join("\n")});
  }
  return items;
}

/** What is in an item: its text, which may go on in rows of its own, then blocks, without their indent. */
function insideOf([first, ...inner]) {
  const begin = inner.findIndex(row => !row.trim() || ITEM.test(row) || FENCE.test(row));
  const plain = begin < 0 ? inner : inner.slice(0, begin), rest = inner.slice(plain.length);
  const indentOf = row => row.search(/\S|$/), depth = indentOf(rest.find(row => row.trim()) || "");
  const text = [ITEM.exec(first)[3], ...plain.map(row => row.trim())].join(" ");
  const blocks = blocksOf(rest.map(row => row.slice(Math.min(depth, indentOf(row)))).join("\n"));
  return [{kind: "line", source: text}, ...blocks];
}

/** Shows a text in `body`. Called again with more of the text, it leaves what was finished as it is. */
function showMarkdown(body, text) {
  showBlocks(body, blocksOf(text));
}

/** Makes the children of `parent` show these blocks. Those that are the same stay, those that can grow do. */
function showBlocks(parent, blocks) {
  blocks.forEach((block, i) => {
    const old = parent.children[i];
    if (old?.block.source === block.source) return;
    const grows = old?.show && old.block.kind === block.kind && block.source.startsWith(old.block.source);
    const element = grows ? old : elementOf(block);
    element.block = block;
    element.show?.(block);
    if (!old) parent.append(element);
    else if (!grows) old.replaceWith(element);
  });
  while (parent.children.length > blocks.length) parent.lastElementChild.remove();
}

/** The element of a block. Those with a method show(block) are filled, and later grow, by that. */
function elementOf(block) {
  switch (block.kind) {
    case "code": return codeBlock();
    case "list": return growing(listOf(block.mark), ({lines}) => itemsOf(lines));
    case "item": return growing(make("li"), ({lines}) => insideOf(lines));
    case "line": return make("span", "", ...inline(block.source));
    case "quote": return growing(make("blockquote"), ({text}) => blocksOf(text));
    case "heading": return make("h" + Math.min(5, block.level + 2), "", ...inline(block.text));
    case "rule": return make("hr");
    case "table": return table(block.lines);
    default: return paragraph(block.lines);
  }
}

function paragraph(lines) {
  return make("p", "", ...lines.flatMap((line, i) => [i ? make("br") : "", ...inline(line)]));
}

function growing(element, blocksIn) {
  element.show = block => showBlocks(element, blocksIn(block));
  return element;
}

function listOf(mark) {
  return /\d/.test(mark) ? Object.assign(make("ol"), {start: parseInt(mark)}) : make("ul");
}

function table(rows) {
  const cells = row => row.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim());
  const aligned = cells(rows[1]).map(rule => {
    if (!rule.endsWith(":")) return "";
    return rule.startsWith(":") ? "center" : "right";
  });
  const cellOf = (tag, text, i) => make(tag, aligned[i], ...inline(text.replaceAll("\\|", "|")));
  const line = (tag, row) => {
    const texts = cells(row).slice(0, aligned.length);
    return make("tr", "", ...texts.map((text, i) => cellOf(tag, text, i)));
  };
  const head = make("thead", "", line("th", rows[0]));
  const body = make("tbody", "", ...rows.slice(2).map(row => line("td", row)));
  return make("div", "table", make("table", "", head, body));
}

/** A block of code under a bar with its language and a button that copies it. Each line is coloured once. */
function codeBlock() {
  const language = make("span"), code = make("code");
  let shown = "", finished = 0, open = null, tail = null;
  const nodeOf = ([kind, run]) => (kind ? make("span", kind, run) : run);
  const lineOf = (runs, end) => make("span", "line", ...runs.map(nodeOf), end);
  const bar = make("div", "bar", language, copyButton(() => shown, "Copy code"));
  const root = make("div", "code", bar, make("pre", "", code));
  root.show = block => {
    const lines = block.text.split("\n"), last = lines.length - 1, known = LANGUAGES.get(block.language);
    tail?.remove();
    for (; finished < last; finished++) {
      const [runs, stillOpen] = highlight(lines[finished], known, open);
      code.append(lineOf(runs, "\n"));
      open = stillOpen;
    }
    tail = lineOf(highlight(lines[last], known, open)[0], "");
    code.append(tail);
    language.textContent = block.language || "text";
    shown = block.text;
  };
  return root;
}

/** A button that copies what `text()` gives, and says whether it could. */
function copyButton(text, label) {
  const button = make("button", "", "Copy");
  button.type = "button";
  button.ariaLabel = label;
  button.onclick = async () => {
    button.textContent = await copy(text()) ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  return button;
}

/** Copies a text; says whether it worked. Pages that came by plain HTTP have no navigator.clipboard. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", "hidden", text), focused = document.activeElement;
    document.body.append(area);
    area.select();
    const worked = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return worked;
  }
}
