"use strict";
// Answers: the messages that a model is sent, without the oldest of a long conversation, and its answer.

// What is sent

/** The messages of a conversation up to a question that a model can be sent. */
function sendable(conversation, question) {
  const path = pathOf({...conversation, last: question.id});
  // A question that got no answer is left out with it: templates want turns to alternate.
  return path.filter((m, i) =>
    (m.role === "user" ? m === question || path[i + 1]?.content !== "" : m.content));
}

/**
 * The messages without the oldest turns, if a model whose context has `limit` tokens would have no room for an
 * answer: its `max_tokens` or a quarter of the context, whichever is less. Turns are dropped down to half of the
 * context, so that the next requests begin alike and the server finds their beginning in its cache. This is an
 * estimate by the tokens of earlier requests; the server has the last word.
 */
function withRoom(messages, {system = "", max_tokens}, limit) {
  const at = messages.findLastIndex(({tokens}) => tokens), counted = messages[at];
  const rate = messages.findLast(({rate}) => rate)?.rate || 1 / 3;  // tokens a character
  const estimate = some => rate * some.reduce((sum, m) => sum + promptOf(m).length, 0);
  let kept = messages.slice(Math.max(0, messages.findIndex(({id}) => id === counted?.first)));
  let tokens = counted  // thoughts are not sent again
    ? counted.tokens - rate * counted.reasoning.length + estimate(messages.slice(at + 1))
    : rate * system.length + estimate(kept);
  if (!limit || tokens + Math.min(Number(max_tokens) || Infinity, limit / 4) <= limit) return kept;
  for (let less; tokens > limit / 2 && (less = withoutOldest(kept)).length; kept = less) {
    tokens -= estimate(kept.slice(0, -less.length));
  }
  return kept;
}

/** The messages without the oldest question and its answer; none if there is but one question. */
function withoutOldest(messages) {
  const next = messages.findIndex(({role}, i) => i && role === "user");
  return next < 0 ? [] : messages.slice(next);
}

/** The body of a request for what follows these messages: an answer, or the rest of one. */
function requestBody(messages, model, {system, stop, thinking, ...numbers}) {
  const sent = messages.map(m => ({role: m.role, content: promptOf(m)}));
  const body = {model, messages: sent, stream: true, stream_options: {include_usage: true}};
  const last = messages.at(-1);
  if (last.role === "assistant") {
    if (last.reasoning) sent.at(-1).reasoning_content = last.reasoning;
    Object.assign(body, {add_generation_prompt: false, continue_final_message: true});
  }
  if (system?.trim()) sent.unshift({role: "system", content: system});
  for (const [name, text] of Object.entries(numbers)) if (text !== "") body[name] = Number(text);
  const stops = (stop || "").split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if (thinking) body.chat_template_kwargs = {enable_thinking: thinking === "on"};
  return body;
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

// Asking

/** Asks for an answer to a question. Given an answer, it asks for another version of that. */
function answer(conversation, before = null) {
  const question = conversation.messages.find(({id}) => id === (before?.parent ?? conversation.last));
  const isRetried = before && isEmpty({...before, error: ""});  // nothing came of it, so it is not kept as a version
  const message = isRetried ? before : addMessage(conversation, question.id, "assistant", "", {reasoning: ""});
  if (before) delete before.error;
  if (isRetried) before = null;
  return ask(conversation, message, sendable(conversation, question), before);
}

/** Asks for the rest of an answer that was stopped or cut. */
function proceedWith(conversation, message) {
  const question = conversation.messages.find(({id}) => id === message.parent);
  return ask(conversation, message, [...sendable(conversation, question), message], null);
}

/** Asks for what follows `messages`, and writes it to `message`. If nothing comes, `before` is shown again. */
async function ask(conversation, message, messages, before) {
  const control = new AbortController();
  running.set(conversation, control);
  conversation.model = $("model").value;
  let sent = withRoom(messages, conversation.options, contextOf(conversation.model));
  showList();
  for (let less; sent; sent = less) {
    less = null;
    message.first = sent.length < messages.length ? sent[0].id : "";
    if (conversation === current) {
      showTurns();
      scrollToEnd();
    }
    try {
      await receive(conversation, message, sent, control.signal);
    } catch (error) {
      const shorter = isTooLong(error) ? withoutOldest(sent) : [];
      if (shorter.length) less = shorter;
      else fail(conversation, message, error);
    }
  }
  if (before && isEmpty({...message, error: ""})) {
    // A new try that brought nothing must not cost the answer that was there.
    conversation.messages = conversation.messages.filter(other => other !== message);
    before.error = message.error;
    showVersion(conversation, before);
  }
  message.changed = Date.now();
  running.delete(conversation);
  if (conversation === current) {
    const wasAtEnd = atEnd;
    showTurns();
    if (wasAtEnd) scrollToEnd();
  }
  if (conversations.includes(conversation)) save(conversation);  // unless it was deleted meanwhile
  else showList();
}

const isTooLong = ({code, message}) =>
  code === "context_length_exceeded" || /maximum context length/.test(message);

// A page that is left or reloaded loses its connections, whatever the server does.
let isLeaving = false;
addEventListener("pagehide", () => { isLeaving = true; });
addEventListener("pageshow", () => { isLeaving = false; });

function fail(conversation, message, error) {
  if (isLeaving) {
    message.reason = "stopped";
    return;
  }
  const isLost = error instanceof TypeError;  // that is how fetch says that there is no connection
  message.error = isLost ? `The server does not answer: ${error.message}.` : error.message;
  if (isTooLong(error)) message.error = `This message is too long for the model. ${error.message}`;
  if (isLost || [401, 404, 503].includes(error.status)) loadModels();
}

// What comes back

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

/**
 * Asks, and writes what comes to `message`. Showing it takes at most a fifth of the time, since the model may
 * run on the same machine.
 */
async function receive(conversation, message, sent, signal) {
  const body = requestBody(sent, conversation.model, conversation.options);
  const written = sent.at(-1) === message ? message.written || 0 : 0;  // tokens of it that are there already
  const timing = {began: performance.now(), first: 0, last: 0, tokens: 0, written, usage: null, reason: ""};
  let due = 0, pause = 0;
  const show = () => {
    const began = performance.now();
    due = 0;
    draw(conversation, message);
    pause = 4 * (performance.now() - began);
  };
  try {
    const request = {method: "POST", headers: headers(), body: JSON.stringify(body), signal};
    const response = await fetch("v1/chat/completions", request);
    if (!response.ok) throw await failure(response);
    for await (const chunk of events(response)) {
      take(chunk, message, timing);
      due ||= setTimeout(() => requestAnimationFrame(show), pause);
    }
  } catch (error) {
    if (!signal.aborted) throw error;
    timing.reason = "stopped";
  } finally {
    const {usage, tokens, reason} = timing;
    message.figures = figuresOf(timing);
    if (tokens || reason) Object.assign(message, {reason, written: written + tokens});
    if (usage) {
      message.tokens = usage.total_tokens;  // its context's, thoughts included
      if (message.written > 9) message.rate = message.written / (message.content + message.reasoning).length;
    } else if (tokens) delete message.tokens;
  }
}

/** Adds a chunk of a stream to `message` and to its `timing`. */
function take(chunk, message, timing) {
  if (chunk.error) throw new Error(`${chunk.error.message} (${chunk.error.type || "error"})`);
  if (chunk.usage) Object.assign(timing, {tokens: chunk.usage.completion_tokens, usage: chunk.usage});
  const choice = chunk.choices?.[0], delta = choice?.delta || {};
  const text = delta.content || "", thought = delta.reasoning_content || delta.reasoning || "";
  if (text || thought) {
    timing.last = performance.now();
    timing.first ||= timing.last;
    if (!timing.usage) timing.tokens++;  // a chunk is about a token until the usage says better
    message.content += text;
    message.reasoning = (message.reasoning + thought).trimStart();
    message.figures = figuresOf(timing);
  }
  timing.reason = choice?.finish_reason || timing.reason;
}

function figuresOf({began, first, last, tokens, written, usage, reason}) {
  const parts = [], rate = (tokens - 1) / (last - first) * 1000, all = written + tokens;
  if (first) parts.push(`${((first - began) / 1000).toFixed(2)} s to first token`);
  if (tokens > 1 && last > first) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (all) parts.push(`${usage ? "" : "about "}${all} token${all > 1 ? "s" : ""}`);
  if (reason && reason !== "stop") parts.push(reason === "length" ? "cut at the limit" : reason);
  return parts.join(" · ");
}
