"use strict";
// The chat page: what is shown, what is asked of the server, and what the buttons do.

const log = $("log"), input = $("input"), scroll = $("scroll"), options = $("options");
const MOST_FILE_BYTES = 256 * 1024;  // of one message's files together

let conversations = storedConversations();
let current = newConversation();      // the one that is shown; among `conversations` once it has a message
let models = [];                      // what the server offers
let attached = [];                    // files of the message that is being written
let editing = null;                   // while the last question is edited: the {text, files} it displaced
let atEnd = true;                     // the end of the conversation is in sight
const running = new Map();            // conversation -> AbortController of the answer being written to it
const updates = new WeakMap();        // message -> the function that shows it as it is now

// Small parts

/** A line above the message's field with a button that ends it and calls `action`. No line for no text. */
function notice(text, {failed = true, label = "Dismiss", action = () => {}} = {}) {
  const [line, button] = $("notice").children;
  $("notice").hidden = !text;
  $("notice").classList.toggle("failed", failed);
  line.textContent = text;
  button.textContent = label;
  button.onclick = () => { notice(""); action(); };
}

function size(bytes) {
  if (bytes < 1000) return `${bytes} bytes`;
  return bytes < 1e6 ? `${Math.round(bytes / 1024)} KB` : `${(bytes / 1024 / 1024).toFixed(1)} MB`;
}

// Conversations: the list, and the one that is shown

/** Keeps a conversation that changed, as the first of the list; the oldest beyond the limit goes. */
function save(conversation) {
  conversation.changed = Date.now();
  conversations = [conversation, ...conversations.filter(other => other !== conversation)];
  for (const old of conversations.splice(MOST_CONVERSATIONS)) forgetConversation(old);
  store(conversation);
  showList();
}

function store(conversation) {
  try {
    storeConversation(conversation);
  } catch {
    notice("This conversation lasts only until its tab is closed: the browser's storage is full or switched "
      + "off. Deleting old conversations makes room.");
  }
}

/** Shows the conversation that the address names, or a new one. */
function openFromAddress() {
  const id = location.hash.slice(1);
  cancelEditing();
  current = conversations.find(({id: other}) => other === id) || newConversation(id, current.model);
  if (!id) history.replaceState(null, "", "#" + current.id);
  showConversation();
}

function open(conversation) {
  history.pushState(null, "", "#" + conversation.id);
  openFromAddress();
  if ($("sidebar").matches(":popover-open")) $("sidebar").hidePopover();
  input.focus();
}

function remove(conversation) {
  running.get(conversation)?.abort();
  conversations = conversations.filter(other => other !== conversation);
  forgetConversation(conversation);
  const shown = conversation === current;
  if (shown) open(newConversation("", current.model));
  showList();
  notice(`“${conversation.title}” is deleted.`, {failed: false, label: "Undo", action: () => {
    conversations = [...conversations, conversation].sort((a, b) => b.changed - a.changed);
    store(conversation);
    if (shown) open(conversation);
    showList();
  }});
  $("notice").lastElementChild.focus();
}

function showList() {
  if ($("list").querySelector("input")) return;  // a title that is being changed stays; rename() comes back
  $("list").replaceChildren(...conversations.map(conversation => {
    const title = make("button", "title", conversation.title);
    const row = make("li", running.has(conversation) ? "running" : "", title);
    title.title = conversation.title;
    title.onclick = () => open(conversation);
    if (conversation === current) title.ariaCurrent = "page";
    row.append(iconButton("pen", `Rename ${conversation.title}`, () => rename(conversation, row)),
      iconButton("bin", `Delete ${conversation.title}`, () => remove(conversation)));
    return row;
  }));
}

/** Turns a row of the list into a field for its title: Enter keeps it, Escape does not. */
function rename(conversation, row) {
  const field = Object.assign(make("input"), {value: conversation.title, ariaLabel: "Title", maxLength: 100});
  const done = keep => {
    field.onblur = null;
    field.remove();
    if (keep && field.value.trim()) {
      conversation.title = field.value.trim();
      store(conversation);
    }
    showList();
  };
  field.onblur = () => done(true);
  field.onkeydown = event => {
    event.stopPropagation();
    if (event.key === "Enter") done(true);
    if (event.key === "Escape") done(false);
  };
  row.replaceChildren(field);
  field.select();
}

function showConversation() {
  log.replaceChildren(...current.messages.map(turnOf));
  for (const field of options.elements) if (field.name) field.value = current.options[field.name] ?? "";
  chooseModel();
  showState();
  showList();
  scrollToEnd();
}

/** Shows what depends on whether an answer is being written, and which turn is the last. */
function showState() {
  const busy = running.has(current);
  $("empty").hidden = current.messages.length > 0;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  const lastQuestion = [...log.querySelectorAll(".turn.user")].at(-1);
  for (const retry of log.querySelectorAll(".retry")) {
    retry.hidden = busy || retry.closest(".turn") !== log.lastElementChild;
  }
  for (const edit of log.querySelectorAll(".edit")) {
    edit.hidden = busy || edit.closest(".turn") !== lastQuestion;
  }
}

// Turns

function turnOf(message) {
  const turn = make("article", "turn " + message.role);
  turn.ariaLabel = message.role === "user" ? "You" : "Answer";
  turn.append(...(message.role === "user" ? questionParts(message) : answerParts(message, turn)));
  return turn;
}

function questionParts(message) {
  const edit = make("button", "", "Edit"), parts = (message.files || []).map(fileView);
  edit.onclick = () => beginEditing(message);
  if (message.content) parts.push(make("div", "body", message.content));
  return [...parts, make("div", "foot edit", edit)];
}

function fileView({name, text}) {
  return make("details", "file", make("summary", "", name, sizeOf(text)), make("pre", "", text));
}

function sizeOf(text) {
  return make("span", "size", size(new Blob([text]).size));
}

function answerParts(message, turn) {
  const thoughts = document.createTextNode(""), summary = make("summary"), body = make("div", "body");
  const thought = make("details", "thought", summary, make("div", "", thoughts));
  const error = make("div", "error"), figures = make("span"), retry = make("button", "retry", "Retry");
  const copyAnswer = copyButton(() => message.content, "Copy the answer");
  error.setAttribute("role", "alert");
  retry.onclick = () => answer(current);
  const update = busy => {
    turn.classList.toggle("busy", busy);
    turn.ariaBusy = busy;
    summary.textContent = busy && !message.content ? "Thinking…" : "Thoughts";
    if (!message.reasoning.startsWith(thoughts.data)) thoughts.data = "";
    thoughts.appendData(message.reasoning.slice(thoughts.length));
    thought.hidden = !message.reasoning;
    showMarkdown(body, message.content);
    error.textContent = message.error || "";
    error.hidden = !message.error;
    figures.textContent = message.figures || "";
    figures.hidden = !message.figures;
    copyAnswer.hidden = busy || !message.content;
  };
  updates.set(message, update);
  update(running.has(current) && message === current.messages.at(-1));
  return [thought, body, error, make("div", "foot", figures, copyAnswer, retry)];
}

/** Shows a message as it is now, and goes on following its end if that was in sight. */
function draw(conversation, message) {
  if (conversation !== current) return;
  updates.get(message)(running.has(conversation));
  if (atEnd) scrollToEnd();
}

function scrollToEnd() {
  scroll.scrollTop = scroll.scrollHeight;
}

// Asking the server

/** The body of a request for the next answer of a conversation. */
function requestBody({messages, options: {system, stop, thinking, ...numbers}}) {
  // A question that got no answer is left out with it: templates want turns to alternate.
  const past = messages.filter((m, i) => (m.role === "user" ? messages[i + 1]?.content !== "" : m.content))
    .map(m => ({role: m.role, content: promptOf(m)}));
  const body = {model: $("model").value, messages: past, stream: true, stream_options: {include_usage: true}};
  if (system?.trim()) past.unshift({role: "system", content: system});
  for (const [name, text] of Object.entries(numbers)) if (text !== "") body[name] = Number(text);
  const stops = (stop || "").split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if (thinking) body.chat_template_kwargs = {enable_thinking: thinking === "on"};
  return JSON.stringify(body);
}

/** A message as the model reads it: its files between fences longer than any in them, then its text. */
function promptOf({content, files = []}) {
  const parts = files.map(({name, text}) => {
    const longest = Math.max(2, ...(text.match(/`+/g) || []).map(ticks => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, content].filter(Boolean).join("\n\n");
}

/** The JSON of each `data:` line of a stream, until [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    const rows = (rest + value).split(/\r?\n/);
    rest = rows.pop();
    for (const row of rows.filter(row => row.startsWith("data:"))) {
      const data = row.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** Takes the answer to a conversation's last question away, and returns it; null if there was none. */
function takeAnswer({messages}) {
  let taken = null;
  while (messages.length && messages.at(-1).role !== "user") taken = messages.pop();
  return taken;
}

/** Asks for the answer to the last question, in place of the one that is there. */
async function answer(conversation) {
  const before = takeAnswer(conversation), message = {role: "assistant", content: "", reasoning: ""};
  const body = requestBody(conversation), control = new AbortController();
  conversation.messages.push(message);
  running.set(conversation, control);
  if (before) log.lastElementChild.remove();
  log.append(turnOf(message));
  showState();
  showList();
  scrollToEnd();
  try {
    await receive(conversation, message, body, control.signal);
  } catch (error) {
    const isLost = error instanceof TypeError;  // that is how fetch says that there is no connection
    message.error = isLost ? `The server does not answer: ${error.message}.` : error.message;
  }
  const isEmpty = !message.content && !message.reasoning;
  // A new try that brought nothing must not cost the answer that was there.
  if (before && isEmpty) Object.assign(message, before, {error: message.error});
  running.delete(conversation);
  showState();
  draw(conversation, message);
  if (conversations.includes(conversation)) save(conversation);  // unless it was deleted meanwhile
}

/** Writes what comes to `message`, which is shown at most once a frame. */
async function receive(conversation, message, body, signal) {
  const timing = {began: performance.now(), first: 0, last: 0, tokens: 0, counted: false, reason: ""};
  let due = false;
  const show = () => {
    due = false;
    draw(conversation, message);
  };
  try {
    const response = await fetch("v1/chat/completions", {method: "POST", headers: headers(), body, signal});
    if (!response.ok) throw await failure(response);
    for await (const chunk of events(response)) {
      take(chunk, message, timing);
      if (!due) due = Boolean(requestAnimationFrame(show));
    }
  } catch (error) {
    if (!signal.aborted) throw error;
    timing.reason = "stopped";
  } finally {
    message.figures = figuresOf(timing);
  }
}

/** Adds a chunk of a stream to `message` and to its `timing`. */
function take(chunk, message, timing) {
  if (chunk.error) throw new Error(`${chunk.error.message} (${chunk.error.type || "error"})`);
  if (chunk.usage) Object.assign(timing, {tokens: chunk.usage.completion_tokens, counted: true});
  const choice = chunk.choices?.[0], delta = choice?.delta || {};
  const text = delta.content || "", thought = delta.reasoning_content || delta.reasoning || "";
  if (text || thought) {
    timing.last = performance.now();
    timing.first ||= timing.last;
    if (!timing.counted) timing.tokens++;  // a chunk is about a token until the usage says better
    message.content += text;
    message.reasoning = (message.reasoning + thought).trimStart();
    message.figures = figuresOf(timing);
  }
  timing.reason = choice?.finish_reason || timing.reason;
}

function figuresOf({began, first, last, tokens, counted, reason}) {
  const parts = [], rate = (tokens - 1) / (last - first) * 1000;
  if (first) parts.push(`${((first - began) / 1000).toFixed(2)} s to first token`);
  if (tokens > 1 && last > first) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (tokens) parts.push(`${counted ? "" : "about "}${tokens} token${tokens > 1 ? "s" : ""}`);
  if (reason && reason !== "stop") parts.push(reason === "length" ? "cut at the limit" : reason);
  return parts.join(" · ");
}

async function loadModels() {
  try {
    const response = await fetch("v1/models", {headers: headers()});
    if (!response.ok) throw await failure(response);
    models = (await response.json()).data;
    $("model").replaceChildren(...models.map(({id}) => Object.assign(make("option", "", id), {value: id})));
    chooseModel();
    notice(models.length ? "" : "The server has no model.");
  } catch (error) {
    notice(`The list of models did not load: ${error.message}`, {label: "Retry", action: loadModels});
  }
}

/** Selects the conversation's model if the server has it, and says how long the context is. */
function chooseModel() {
  if (models.some(({id}) => id === current.model)) $("model").value = current.model;
  $("model").disabled = models.length < 2;
  const length = models.find(({id}) => id === $("model").value)?.max_model_len;
  $("about").textContent = (length ? `Up to ${length.toLocaleString("en")} tokens. ` : "")
    + `The last ${MOST_CONVERSATIONS} conversations are kept in this browser.`;
}

// The message that is being written

function submit(text) {
  if (!(text.trim() || attached.length) || running.has(current)) return;
  if (!models.length) {  // the text stays where it is until there is somebody to answer
    loadModels();
    return;
  }
  if (editing) {
    takeAnswer(current);
    current.messages.pop();
    log.replaceChildren(...current.messages.map(turnOf));
  }
  const message = {role: "user", content: text.trim(), ...(attached.length ? {files: attached} : {})};
  current.messages.push(message);
  current.title ||= titleOf(message);
  current.model = $("model").value;
  log.append(turnOf(message));
  editing = null;
  write("", []);
  save(current);
  answer(current);
}

/** Puts a text and files where the next message is written. */
function write(text, files) {
  input.value = text;
  attached = files;
  $("editing").hidden = !editing;
  showFiles();
  keepDraft();
}

/** Lets the field grow with its text, and keeps the text for when the tab is loaded again. */
function keepDraft() {
  input.style.height = "auto";
  input.style.height = input.scrollHeight + "px";
  keep("sessionStorage", "shoal.draft", input.value);
}

function beginEditing(message) {
  editing ||= {text: input.value, files: attached};
  write(message.content, message.files || []);
  input.focus();
}

function cancelEditing() {
  if (!editing) return;
  const {text, files} = editing;
  editing = null;
  write(text, files);
}

function showFiles() {
  $("files").replaceChildren(...attached.map(file => {
    const drop = () => { attached = attached.filter(other => other !== file); showFiles(); };
    return make("li", "", file.name, sizeOf(file.text), iconButton("cross", `Remove ${file.name}`, drop));
  }));
}

/** Attaches files as text. What is too large or not text is refused, and the notice says why. */
async function attach(files) {
  const refused = [];
  for (const file of files) {
    try {
      attached = [...attached, await textFile(file)];
    } catch (error) {
      refused.push(error.message);
    }
  }
  notice(refused.join(" "));
  showFiles();
  input.focus();
}

async function textFile(file) {
  const bytes = attached.reduce((sum, {text}) => sum + new Blob([text]).size, file.size);
  if (bytes > MOST_FILE_BYTES) {
    throw new Error(`“${file.name}” (${size(file.size)}) is too large: a message's files may have `
      + `${size(MOST_FILE_BYTES)} together. Attach the part that matters.`);
  }
  try {
    const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return {name: file.name, text};
  } catch { /* It is no UTF-8, or no file at all: a folder. */ }
  throw new Error(`“${file.name}” is not a text file (UTF-8), and text is all that can be attached.`);
}

// Events

scroll.onscroll = () => {
  atEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 90;
};
new ResizeObserver(() => { if (atEnd) scrollToEnd(); }).observe(scroll);  // a phone's keyboard, a notice

$("composer").onsubmit = event => {
  event.preventDefault();
  submit(input.value);
};
input.oninput = keepDraft;
input.onkeydown = event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit(input.value);
};
$("stop").onclick = () => running.get(current)?.abort();
document.onkeydown = event => {
  if (event.key !== "Escape" || document.querySelector("dialog[open], :popover-open")) return;
  if (editing) cancelEditing();
  else running.get(current)?.abort();
};
for (const button of $("empty").querySelectorAll("button")) {
  button.onclick = () => {
    const draft = input.value;
    submit(button.textContent);
    write(draft, attached);  // what was being written is not lost
  };
}
for (const button of document.querySelectorAll(".new")) {
  button.onclick = () => open(newConversation("", current.model));
}
$("editing").lastElementChild.onclick = cancelEditing;
addEventListener("popstate", openFromAddress);
matchMedia("(min-width: 860px)").onchange = () => $("sidebar").hidePopover();

$("attach").onclick = () => $("file").click();
$("file").onchange = async () => {
  await attach([...$("file").files]);
  $("file").value = "";  // so that the same file can be chosen again
};
const dropping = is => document.body.classList.toggle("dropping", is);
const carriesFiles = event => event.dataTransfer.types.includes("Files");
document.ondragover = event => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  dropping(true);
};
document.ondragleave = event => { if (!event.relatedTarget) dropping(false); };
document.ondrop = event => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  dropping(false);
  attach([...event.dataTransfer.files]);
};

$("model").onchange = () => {
  current.model = $("model").value;
  chooseModel();
  if (conversations.includes(current)) store(current);
};
options.onsubmit = event => {
  event.preventDefault();
  $("settings").close();
};
options.oninput = () => {
  for (const field of options.elements) {
    if (field.name && field.checkValidity()) current.options[field.name] = field.value;
  }
  if (conversations.includes(current)) store(current);
};
followKey(loadModels);

// Another tab kept or deleted a conversation. The one that is shown or answered here stays as it is.
addEventListener("storage", event => {
  if (!event.key?.startsWith(ENTRY)) return;
  const ours = conversations.filter(conversation => conversation === current || running.has(conversation));
  const others = storedConversations().filter(({id}) => !ours.some(conversation => conversation.id === id));
  conversations = [...ours, ...others].sort((a, b) => b.changed - a.changed);
  showList();
});
// A phone may end a page that is out of sight: as much of a running answer as there is, is kept then.
addEventListener("visibilitychange", () => { if (document.hidden) [...running.keys()].forEach(store); });
addEventListener("pagehide", () => [...running.keys()].forEach(store));

openFromAddress();
write(storage("sessionStorage")?.getItem("shoal.draft") || "", []);
loadModels();
