"use strict";
// LaTeX in Markdown: $...$ and \(...\) are formulas in a line, $$...$$ and \[...\] formulas of their own. The
// rules here find them for markdown-it, so that nothing in a formula is read as Markdown; KaTeX draws them.

// In characters: text with many openings must not cost the square of its length.
const MOST_LATEX = 5000;
const DISPLAY = [["$$", "$$"], ["\\[", "\\]"]];
const ENVIRONMENT = /^\\begin\{((?:equation|align|gather|alignat)\*?)\}/;
const IN_DOLLARS = /(?<![$\\])\$(?=[^\s$])((?:\\.|[^\\$`]){1,2000})(?<!\s)\$(?!\$)/suy;

/**
 * Whether what stands between two dollar signs is a formula, and not the text between two prices or two variables
 * of a shell: it has a command or a power, or no letter or digit touches its signs from outside ("the $n$th" may).
 */
function isFormula(latex, before, after) {
  if (/\\\p{L}|\^/u.test(latex)) return true;
  const isPrice = /^\d[^\s=]*\s+\p{L}{2}/u.test(latex);  // as in "$5 a day, or 30$"
  if (isPrice || /[\p{L}\p{N}_]/u.test(before) || /[\p{N}_]/u.test(after)) return false;
  return !/\p{L}/u.test(after) || /^\w(_\w+)?$/.test(latex);
}

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
    state.pos = pos + latex.length + 2;
    if (!isFormula(latex, src[pos - 1] || "", src[state.pos] || "")) latex = "";
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
  const name = ENVIRONMENT.exec(lineAt(first))?.[1], pair = ["", `\\end{${name}}`];
  const [opening, closing] = name ? pair : DISPLAY.find(([mark]) => lineAt(first).startsWith(mark)) || [];
  if (!closing || state.sCount[first] - state.blkIndent >= 4) return false;
  const lines = [], isWithin = i => i === first || state.sCount[i] >= state.blkIndent || state.isEmpty(i);
  for (let i = first; i < end && isWithin(i); i++) {
    const line = i === first ? lineAt(i).slice(opening.length) : lineAt(i), at = line.indexOf(closing);
    lines.push(at < 0 ? line : line.slice(0, name ? at + closing.length : at));
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
