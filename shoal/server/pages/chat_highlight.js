"use strict";
// The colours of code. A line is split into runs of comment, string, number, keyword and the rest, with what
// is still open at its end (a block comment, a long string), so that code can be coloured as it arrives.

const words = text => new Set(text.split(/\s+/));
const BLOCK_COMMENT = {"/*": ["*/", "comment"]};
const TEMPLATE_STRING = {"`": ["`", "string"]};
const TRIPLE_QUOTES = {'"""': ['"""', "string"], "'''": ["'''", "string"]};

const C_WORDS = `break case char class const continue default delete do double else enum extern false float
  for goto if int long new null nullptr private protected public return short signed sizeof static struct
  switch template this throw true try catch typedef typename union unsigned using virtual void volatile
  while auto bool namespace inline operator override constexpr include define ifdef ifndef endif pragma`;
const JAVA_WORDS = `abstract assert boolean break byte case catch char class const continue default do
  double else enum extends false final finally float for if implements import in instanceof int interface
  internal is lazy long namespace new null object out override package private protected public readonly
  record return sealed short static string super switch synchronized this throw throws true try using val
  var virtual void volatile when while fun suspend companion data async await foreach`;
const JS_WORDS = `abstract any as async await boolean break case catch class const continue debugger declare
  default delete do else enum export extends false finally for from function get if implements import in
  instanceof interface keyof let namespace never new null number of private protected public readonly return
  set static string super switch this throw true try type typeof undefined unknown var void while with
  yield`;
const PYTHON_WORDS = `False None True and as assert async await break case class continue def del elif else
  except finally for from global if import in is lambda match nonlocal not or pass raise return self try
  while with yield`;
const GO_WORDS = `any bool break byte case chan const continue default defer else error fallthrough false
  float32 float64 for func go goto if import int int32 int64 interface map nil package range return rune
  select string struct switch true type uint uint64 var make append len`;
const RUST_WORDS = `Self as async await bool break char const continue crate dyn else enum extern f32 f64
  false fn for i32 i64 if impl in let loop match mod move mut pub ref return self static str struct super
  trait true type u32 u64 u8 unsafe use usize where while func guard init nil protocol var extension defer
  throws throw try catch switch case class import`;
const SHELL_WORDS = `case do done elif else esac exit export fi for function if in local read return set
  shift source then unset until while cd echo sudo FROM RUN COPY ADD CMD ENTRYPOINT ENV ARG WORKDIR EXPOSE`;
const RUBY_WORDS = `alias and begin break case class def do else elsif end ensure false for if in include
  module my next nil not or puts redo require rescue retry return self sub super then true undef unless
  until use when while yield foreach print local function repeat`;
const SQL_WORDS = `add all alter and as asc begin between by case check commit constraint create cross
  database default delete desc distinct drop else end exists false foreign from full group having if in
  index inner insert into is join key left like limit not null offset on or order outer primary references
  right rollback select set table then true union unique update using values view when where with`;

// What a language is made of: `line` begins a comment that ends with its line; `long` maps what opens a run
// of several lines to [what closes it, its kind]; `quotes` are the marks of strings that end on their line;
// `special` is a pattern of what else is shown as a keyword; `words` are the keywords.
const FAMILIES = [
  ["c h cpp c++ cc hpp cuda cu objc metal glsl", {line: "//", long: BLOCK_COMMENT, words: words(C_WORDS)}],
  ["java kotlin kt csharp c# cs scala dart groovy",
    {line: "//", long: BLOCK_COMMENT, words: words(JAVA_WORDS)}],
  ["javascript js jsx mjs typescript ts tsx php",
    {line: "//", long: {...BLOCK_COMMENT, ...TEMPLATE_STRING}, words: words(JS_WORDS)}],
  ["python py python3 ipython",
    {line: "#", long: TRIPLE_QUOTES, special: "@[\\w.]+", words: words(PYTHON_WORDS)}],
  ["go golang", {line: "//", long: {...BLOCK_COMMENT, ...TEMPLATE_STRING}, words: words(GO_WORDS)}],
  ["rust rs swift zig", {line: "//", long: BLOCK_COMMENT, quotes: '"', words: words(RUST_WORDS)}],
  ["bash sh shell zsh console dockerfile docker makefile make", {line: "#", words: words(SHELL_WORDS)}],
  ["ruby rb perl pl r julia elixir", {line: "#", words: words(RUBY_WORDS)}],
  ["lua", {line: "--", long: {"--[[": ["]]", "comment"]}, words: words(RUBY_WORDS)}],
  ["sql mysql postgresql postgres sqlite",
    {line: "--", long: BLOCK_COMMENT, words: words(SQL_WORDS), ignoreCase: true}],
  ["json jsonc json5",
    {line: "//", special: '"(?:\\\\.|[^"\\\\])*"(?=\\s*:)', words: words("true false null")}],
  ["yaml yml toml ini",
    {line: "#", special: "[\\w.-]+(?=\\s*[:=])|^\\s*\\[.*\\]", words: words("true false null")}],
  ["css scss less",
    {long: BLOCK_COMMENT, special: "@[\\w-]+|[\\w-]+(?=\\s*:)", words: words("important")}],
  ["html xml svg vue",
    {long: {"<!--": ["-->", "comment"]}, special: "</?[\\w:-]+|/?>", words: words("DOCTYPE")}],
];

const literally = text => text.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&");

/** The pattern that finds the next run of a language; the name of the group that matches is its kind. */
function patternOf({line, long = {}, quotes = "\"'", special}) {
  const strings = [...quotes].map(quote => `${quote}(?:\\\\.|[^${quote}\\\\])*${quote}`).join("|");
  const parts = [["long", Object.keys(long).map(literally).join("|")],
    ["comment", line && (line === "#" ? "(?<!\\S)#.*" : literally(line) + ".*")], ["keyword", special],
    ["string", strings], ["number", "\\b\\d\\w*(?:\\.\\d\\w*)?"], ["word", "[A-Za-z_$][\\w$]*"]];
  const groups = parts.filter(([, part]) => part).map(([kind, part]) => `(?<${kind}>${part})`);
  return new RegExp(groups.join("|"), "g");
}

const LANGUAGES = new Map();
for (const [names, family] of FAMILIES) {
  const language = {...family, pattern: patternOf(family)};
  for (const name of names.split(" ")) LANGUAGES.set(name, language);
}

/**
 * One line of code as [runs, open]. A run is [kind, text], its kind "comment", "string", "number", "keyword"
 * or "". `open` is what the line before left open, [what closes it, its kind], or null.
 */
function highlight(line, language, open) {
  if (!language) return [[["", line]], null];
  const runs = [];
  let at = 0;
  const take = (kind, end) => {
    if (end > at) runs.push([kind, line.slice(at, end)]);
    at = end;
  };
  const takeOpen = from => {  // as far as what is open goes on this line
    const end = closingEnd(line, open, from);
    take(open[1], end < 0 ? line.length : end);
    if (end >= 0) open = null;
  };
  if (open) takeOpen(0);
  for (let found; !open && (found = nextRun(language, line, at));) {
    const text = found[0], kind = kindOf(found.groups, language);
    take("", found.index);
    if (kind === "long") {
      open = language.long[text];
      takeOpen(found.index + text.length);
    } else take(kind, found.index + text.length);
  }
  take("", line.length);
  return [runs, open];
}

function nextRun(language, line, at) {
  language.pattern.lastIndex = at;
  return language.pattern.exec(line);
}

function kindOf(groups, language) {
  const [kind, text] = Object.entries(groups).find(([, text]) => text !== undefined);
  if (kind !== "word") return kind;
  return language.words.has(language.ignoreCase ? text.toLowerCase() : text) ? "keyword" : "";
}

/** Where what is open ends, at or after `from`; -1 if not on this line. A backslash escapes in strings. */
function closingEnd(line, [closing, kind], from) {
  for (let i = from; i < line.length; i++) {
    if (line[i] === "\\" && kind === "string") i++;
    else if (line.startsWith(closing, i)) return i + closing.length;
  }
  return -1;
}
