"use strict";
// The conversations, as this browser keeps them (localStorage): one entry each, so that saving one is cheap.
//
// A conversation is {id, title, changed, model, options, messages, last}: `changed` in milliseconds since 1970,
// `options` the fields of the settings, `last` the id of the last message that is shown. A message is {id,
// parent, role, content, changed}. Messages with one parent are versions of one another, so a conversation is a
// tree; its root has the id "". A question may have files, each {name, text}; an answer has reasoning and may
// have figures, an error, the reason why it ended, its tokens, and the id of the first message that was sent.
//
// Messages are added and never removed once they are kept, and the newer state of a message wins. So two tabs
// that write to one conversation keep the messages of both.

const ENTRY = "shoal.chat.", MOST_CONVERSATIONS = 100, ROLES = ["user", "assistant"];

const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);

/** A conversation without messages, with an id of its own if none is given. */
function newConversation(id, model) {
  return {id: id || newId(), title: "", changed: Date.now(), model, options: {}, messages: [], last: ""};
}

// Messages

/** Adds a message after the one with the id `parent`, as the last that is shown. */
function addMessage(conversation, parent, role, content, more = {}) {
  const message = {id: newId(), parent, role, content, changed: Date.now(), ...more};
  conversation.messages.push(message);
  conversation.last = message.id;
  return message;
}

/** The messages that are shown, the first one first. */
function pathOf({messages, last}) {
  const byId = new Map(messages.map(message => [message.id, message])), path = [];
  for (let message = byId.get(last); message; message = byId.get(message.parent)) path.unshift(message);
  return path;
}

/** The messages that stand in the same place, this one among them. */
function versionsOf({messages}, {parent}) {
  return messages.filter(message => message.parent === parent);
}

/** Shows a message, and what followed it most recently. */
function showVersion(conversation, message) {
  for (let next = message; next; next = conversation.messages.findLast(({parent}) => parent === next.id)) {
    conversation.last = next.id;
  }
}

const isEmpty = ({role, content, reasoning, error}) =>
  role === "assistant" && !content && !reasoning && !error;

/** Takes over what is new in another state of the same conversation. */
function mergeMessages(conversation, other) {
  const byId = new Map(conversation.messages.map(message => [message.id, message]));
  for (const message of other.messages) {
    const known = byId.get(message.id);
    if (known && message.changed > known.changed) {
      for (const field of Object.keys(known)) delete known[field];  // an error, say, that is gone
      Object.assign(known, message);
    }
    if (!known && !isEmpty(message)) conversation.messages.push(message);
  }
}

/** Whether another state of the same conversation lacks some of this one. */
function isBehind(other, {messages}) {
  const changes = new Map(other.messages.map(({id, changed}) => [id, changed]));
  return messages.some(message => !isEmpty(message) && !(changes.get(message.id) >= message.changed));
}

// What is kept

/** All conversations that are kept, the latest first. */
function storedConversations() {
  const entries = Object.keys(storage("localStorage") || {}).filter(name => name.startsWith(ENTRY));
  return entries.map(storedConversation).filter(Boolean).sort((a, b) => b.changed - a.changed);
}

function storedConversation(entry) {
  try {
    return readConversation(JSON.parse(localStorage.getItem(entry)));
  } catch {
    return null;  // somebody else's entry, or one that was cut off
  }
}

/**
 * A conversation out of JSON that may be anything; null if it is not one. Messages without ids, as in requests
 * and in what older pages kept, follow one another.
 */
function readConversation(given) {
  if (!Array.isArray(given?.messages)) return null;
  const {id, title, changed, model, options} = given, conversation = newConversation(text(id), text(model));
  const ids = new Set([""]);
  for (const [i, message] of given.messages.entries()) {
    const {role, content, changed: at} = message || {};
    if (!ROLES.includes(role) || typeof content !== "string") continue;
    const parent = ids.has(message.parent) ? message.parent : conversation.last;
    const read = addMessage(conversation, parent, role, content, message);
    Object.assign(read, {id: text(message.id) || String(i), parent, changed: Number(at) || 0});
    conversation.last = read.id;
    if (role === "assistant") read.reasoning = text(read.reasoning);
    const files = Array.isArray(read.files) ? read.files : [];
    read.files = files.filter(file => text(file?.name) && text(file.text));
    ids.add(read.id);
  }
  if (given.last !== undefined && ids.has(given.last)) conversation.last = given.last;
  const first = conversation.messages[0];
  conversation.title = text(title) || (first ? titleOf(first) : "");
  conversation.changed = Number.isFinite(changed) ? changed : Date.now();
  for (const [name, value] of Object.entries(options || {})) conversation.options[name] = text(value);
  return conversation;
}

const text = value => (typeof value === "string" ? value : "");

/**
 * Keeps a conversation, with what another tab has added to it. Raises what the browser raises when its storage
 * is full or switched off.
 */
function storeConversation(conversation) {
  const kept = storedConversation(ENTRY + conversation.id);
  if (kept) mergeMessages(conversation, kept);
  localStorage.setItem(ENTRY + conversation.id, JSON.stringify(conversation));
}

function forgetConversation(conversation) {
  storage("localStorage")?.removeItem(ENTRY + conversation.id);
}

/** A name for a conversation: how its first question begins, or its first file. */
function titleOf({content, files = []}) {
  const line = content.trim().split("\n")[0] || files[0]?.name || "Conversation";
  return line.length > 60 ? line.slice(0, 59).trimEnd() + "…" : line;
}
