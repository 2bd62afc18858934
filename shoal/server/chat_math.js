"use strict";
// LaTeX in Markdown: $...$ and \(...\) are formulas in a line, $$...$$ and \[...\] formulas of their own. The
// rules here find them for markdown-it, so that nothing in a formula is read as Markdown; KaTeX draws them.

// In characters: text with many openings must not cost the square of its length.
const MOST_LATEX = 5000;
const DISPLAY = [["$$", "$$"], ["\\[", "\\]"]];
// A dollar sign is a price, a shell's variable or a formula. Formulas touch their signs from inside, and no
// letter or digit touches them from outside; "$5 and a fee of 3$" has a word behind its number.
const IN_DOLLARS = /(?<![\w$\\])\$(?=[^\s$])((?:\\.|[^\\$`]){1,2000})(?<!\s)\$(?![\w$])/suy;
const PRICE = /^\d[\d.,]*\s+\p{L}{2}/u;

/** Rules for markdown-it. A formula becomes an element .math, or .math.display, with its LaTeX as text. */
function mathRules(markdown) {
  markdown.inline.ruler.before("escape", "math", mathInLine);
  markdown.block.ruler.before("fence", "math", mathBlock, {
    alt: ["paragraph", "reference", "blockquote", "list"],
  });
  markdown.renderer.rules.math = (tokens, i) => {
    const {tag, info, content} = tokens[i];
    return `<${tag} class="${info}">${markdown.utils.escapeHtml(content)}</${tag}>`;
  };
}

function mathInLine(state, silent) {
  const {src, pos} = state, display = DISPLAY.find(([opening]) => src.startsWith(opening, pos));
  let latex;
  if (display || src.startsWith("\\(", pos)) {
    const [opening, closing] = display || ["\\(", "\\)"], begin = pos + opening.length;
    const length = src.slice(begin, begin + MOST_LATEX).indexOf(closing);
    latex = length < 0 ? "" : src.slice(begin, begin + length);
    state.pos = begin + length + closing.length;
  } else {
    IN_DOLLARS.lastIndex = pos;
    latex = IN_DOLLARS.exec(src)?.[1] || "";
    if (PRICE.test(latex)) latex = "";
    state.pos = pos + latex.length + 2;
  }
  if (!latex.trim()) {
    state.pos = pos;
    return false;
  }
  if (!silent) addMath(state, "span", display, latex);
  return true;
}

/** A formula that begins its line and is alone on its lines. */
function mathBlock(state, first, end, silent) {
  const lineAt = i => state.src.slice(state.bMarks[i] + state.tShift[i], state.eMarks[i]);
  const [opening, closing] = DISPLAY.find(([opening]) => lineAt(first).startsWith(opening)) || [];
  if (!opening || state.sCount[first] - state.blkIndent >= 4) return false;
  const lines = [], isWithin = i => i === first || state.sCount[i] >= state.blkIndent || state.isEmpty(i);
  for (let i = first; i < end && isWithin(i); i++) {
    const line = i === first ? lineAt(i).slice(opening.length) : lineAt(i), at = line.indexOf(closing);
    lines.push(at < 0 ? line : line.slice(0, at));
    if (at < 0) continue;
    if (line.slice(at + closing.length).trim() || !lines.join("").trim()) return false;
    if (silent) return true;
    state.line = i + 1;
    addMath(state, "div", true, lines.join("\n")).map = [first, i + 1];
    return true;
  }
  return false;  // not closed, perhaps not yet
}

function addMath(state, tag, display, latex) {
  const info = display ? "math display" : "math";
  return Object.assign(state.push("math", tag, 0), {info, content: latex.trim(), block: tag === "div"});
}

/** Draws the LaTeX that an element holds. What KaTeX cannot read stays as text. */
function drawMath(element) {
  const latex = element.textContent, displayMode = element.classList.contains("display");
  try {
    katex.render(latex, element, {displayMode, strict: "ignore", maxSize: 40});
  } catch {
    element.replaceChildren(make("code", "", latex));
  }
}
