"use strict";
// The chat page: what is shown, what is asked of the server, and what the buttons do.

const log = $("log"), input = $("input"), scroll = $("scroll"), options = $("options");
const MOST_FILE_BYTES = 256 * 1024;  // of one message's files together

let conversations = storedConversations();
let current = newConversation();      // the one that is shown; among `conversations` once it has a message
let models = [];                      // what the server offers
let attached = [];                    // files of the message that is being written
let editing = null;                   // {message, text, files}: what is edited, and the displaced draft
let atEnd = true;                     // the end of the conversation is in sight
const running = new Map();            // conversation -> AbortController of the answer being written to it
let isWaiting = false;                // there is no model yet, as the notice says
let needsKey = false;                 // the server refused to name its models
let nextLook = 0;                     // the timer of the next request for models, while there is no model

// Small parts

/** A line above the message's field with a button that ends it and calls `action`. No line for no text. */
function notice(text, {failed = true, label = "Dismiss", action = () => {}} = {}) {
  const [line, button] = $("notice").children;
  $("notice").hidden = !text;
  $("notice").classList.toggle("failed", failed);
  if (line.textContent !== text) line.textContent = text;  // an alert that stays is not read out again
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

function showConversation() {
  log.replaceChildren();
  for (const field of options.elements) if (field.name) field.value = current.options[field.name] ?? "";
  chooseModel();
  showTurns();
  showList();
  scrollToEnd();
}

/** Shows what depends on whether an answer is being written, and how full the context is. */
function showState() {
  const busy = running.has(current), path = pathOf(current);
  $("empty").hidden = path.length > 0;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  log.classList.toggle("waits", busy);
  const limit = contextOf($("model").value), used = path.findLast(({tokens}) => tokens)?.tokens;
  $("context").hidden = !used || !limit;
  if (!used || !limit) return;
  const [bar, text] = $("context").children;
  Object.assign(bar, {max: limit, value: used});
  text.textContent = `${used.toLocaleString("en")} of ${limit.toLocaleString("en")} tokens`;
}

// Models

/** Shows the models of the server. While there is no model, it asks again every two seconds. */
async function loadModels() {
  clearTimeout(nextLook);
  needsKey = false;
  let why = "No model is ready: the workers may be starting.", failed = false;
  try {
    const response = await fetch("v1/models", {headers: headers()});
    if (!response.ok) throw await failure(response);
    models = (await response.json()).data;
    $("model").replaceChildren(...models.map(({id}) => Object.assign(make("option", "", id), {value: id})));
    chooseModel();
    showState();
  } catch (error) {
    [models, failed] = [[], true];
    why = error instanceof TypeError ? "The server does not answer." : error.message;
    needsKey = error.status === 401;
  }
  if (models.length && isWaiting) notice("");
  isWaiting = !models.length;
  if (!isWaiting) return;
  if (needsKey) {
    notice(why, {label: "Enter the key", action: askForKey});
  } else {
    notice(`${why} This page asks again every two seconds.`, {failed, label: "Ask now", action: loadModels});
    nextLook = setTimeout(loadModels, 2000);
  }
}

function askForKey() {
  $("settings").showModal();
  $("key").focus();
}

/** How many tokens the context of a model has; undefined if the server does not say. */
const contextOf = name => models.find(({id}) => id === name)?.max_model_len;

/** Selects the conversation's model if the server has it, and says how long the context is. */
function chooseModel() {
  if (models.some(({id}) => id === current.model)) $("model").value = current.model;
  $("model").disabled = models.length < 2;
  const model = $("model").value, length = contextOf(model);
  const isSmall = model === "smollm2";  // the default model
  $("about").textContent = (isSmall ? `${model} is small, to try things out; larger models answer better. ` : "")
    + (length ? `Up to ${length.toLocaleString("en")} tokens. ` : "")
    + `The last ${MOST_CONVERSATIONS} conversations are kept in this browser.`;
}

/** Shows the model's own sampling fields in the settings' empty fields, as far as the server reports them. */
async function showDefaults() {
  const model = $("model").value, found = {};
  try {
    const request = {method: "POST", headers: headers(), body: JSON.stringify({model})};
    const response = await fetch("api/show", request);
    if (!response.ok) throw await failure(response);
    for (const line of (await response.json()).parameters.split("\n")) {
      const [name, value] = line.split(/\s+/);
      found[name === "repeat_penalty" ? "repetition_penalty" : name] = value;
    }
  } catch { /* Another server's model without known defaults: the fields say "default". */ }
  for (const field of options.querySelectorAll("input[name][type=number]")) {
    field.placeholder = found[field.name] || (field.name === "seed" ? "random" : "default");
  }
}

// The message that is being written

function submit(text) {
  if (!(text.trim() || attached.length) || running.has(current)) return;
  if (editing?.message.role === "assistant") {
    keepEdited(text);
    return;
  }
  if (!models.length) {  // the text stays where it is until there is a model
    if (needsKey) askForKey();
    else loadModels();
    return;
  }
  const parent = editing ? editing.message.parent : current.last;
  const files = attached.length ? {files: attached} : {};
  const message = addMessage(current, parent, "user", text.trim(), files);
  current.title ||= titleOf(message);
  editing = null;
  write("", []);
  save(current);
  answer(current);
}

/** Keeps the text of an answer that was edited as another version of it. */
function keepEdited(text) {
  const {message: {parent, reasoning, first}, text: draft, files} = editing;
  addMessage(current, parent, "assistant", text, {reasoning, first, figures: "edited"});
  editing = null;
  write(draft, files);
  save(current);
  showTurns();
}

/** Puts a text and files where the next message is written. */
function write(text, files) {
  input.value = text;
  attached = files;
  $("editing").hidden = !editing;
  $("attach").hidden = editing?.message.role === "assistant";
  showFiles();
  keepDraft();
}

/** Lets the field grow with its text, and keeps the text for when the tab is loaded again. */
function keepDraft() {
  input.style.height = "auto";
  input.style.height = input.scrollHeight + "px";
  keep("sessionStorage", "shoal.draft", input.value);
}

/** Takes a message into the field. What becomes of it is another version of the message. */
function beginEditing(message) {
  editing = {text: input.value, files: attached, ...editing, message};
  const what = message.role === "user" ? "Editing a question: it is asked anew" : "Editing an answer";
  $("editing").firstElementChild.textContent = `${what}; the earlier version stays.`;
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
  } catch { /* It is not UTF-8, or a folder. */ }
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
  if (event.key === "k" && (event.ctrlKey || event.metaKey) && !$("settings").open) {
    event.preventDefault();
    if (!$("sidebar").checkVisibility()) $("sidebar").showPopover();
    $("search").focus();
  }
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
$("open-settings").addEventListener("click", showDefaults);

// Another tab kept or deleted a conversation. What is shown or answered here stays, with what was added there.
addEventListener("storage", ({key}) => {
  if (!key?.startsWith(ENTRY)) return;
  const id = key.slice(ENTRY.length), kept = storedConversation(key);
  const known = [current, ...conversations].find(conversation => conversation.id === id);
  if (!kept) {
    conversations = conversations.filter(one => one !== known || one === current || running.has(one));
  } else if (!known) {
    conversations.push(kept);
  } else {
    follow(known, kept);
    if (!conversations.includes(known)) conversations.push(known);
    // Browsers notify tabs of each other's entries with a delay: two may have been written at once.
    if (isBehind(kept, known) && !running.has(known)) store(known);
  }
  conversations.sort((a, b) => b.changed - a.changed);
  showList();
});

/** Takes over what another tab kept of a conversation, and shows the turns that were added after the last. */
function follow(conversation, {title, options: settings, changed, last, messages}) {
  const added = pathOf({messages, last}), ours = conversation.last;
  const isContinued = added.at(-1)?.role === "assistant" && (!ours || added.some(({id}) => id === ours));
  mergeMessages(conversation, {messages});
  Object.assign(conversation, {title, options: settings, changed});
  if (isContinued && !running.has(conversation)) conversation.last = last;
  if (conversation === current) showTurns();
}
// A phone may end a page that is out of sight: as much of a running answer as there is, is kept then.
addEventListener("visibilitychange", () => { if (document.hidden) [...running.keys()].forEach(store); });
addEventListener("pagehide", () => [...running.keys()].forEach(store));

openFromAddress();
write(storage("sessionStorage")?.getItem("shoal.draft") || "", []);
loadModels();
