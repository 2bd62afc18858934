"use strict";
// Blocks of code, which grow line by line, and the buttons that copy.

/**
 * A block of code under a bar with its language and a button that copies it. Its method show({language, text})
 * fills it; each line is coloured once, as long as the text only grows.
 */
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
    if (!block.text.startsWith(shown.slice(0, shown.lastIndexOf("\n") + 1))) {
      code.replaceChildren();
      [finished, open] = [0, null];
    }
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
