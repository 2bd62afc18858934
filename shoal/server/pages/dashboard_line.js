"use strict";
// A request's timeline: where its time went up to the first token, each token, and the gaps between them.

const SLOW = 3;  // times the median: a gap that is shown as slow

/** Shows what GET /requests/{id} answers. */
function showLine(request) {
  const whole = Math.max(request.seconds, 1e-6);
  facts($("line-facts"), requestFacts(request));
  const spans = [...request.spans].sort((a, b) => a.start_s - b.start_s);
  const rows = spans.map(span => spanRow(span, whole));
  if (request.tokens.length) rows.push(tokenRow(request.tokens, whole));
  $("spans").replaceChildren(axisRow(whole), ...rows);
  showGaps(request.tokens, whole);
}

function requestFacts(request) {
  const {prompt_tokens: prompt, cached_tokens: cached, output_tokens: output} = request;
  const status = make("b", request.status, request.status);
  return [
    ["Request", request.id],
    ["Model", `${request.model} at ${request.endpoint}`],
    ["Status", make("span", "", status, request.finish_reason ? `, ${request.finish_reason}` : "")],
    ["Began", `${clock(request.started_at)}, ${seconds(request.seconds)} ${request.status === "running" ? "so far" : "in all"}`],
    ["Tokens", `${prompt.toLocaleString("en")} of prompt (${cached.toLocaleString("en")} cached), `
      + `${output.toLocaleString("en")} of output`],
    ["Latency", `${orDash(request.ttft_s, seconds)} to the first token, ${orDash(request.itl_s, seconds)} between tokens`],
    ...(request.workers.length ? [["Workers", request.workers.join(", ")]] : []),
  ];
}

/** A row of the timeline: name, track, seconds. */
function row(name, detail, track, time) {
  const label = make("span", "name", name, ...(detail ? [" ", make("em", "", detail)] : []));
  return make("div", "span", label, track, make("span", "seconds", time));
}

function axisRow(whole) {
  return row("", "", make("small", "", ""), seconds(whole));
}

/** A bar from `start` on, both in seconds. `kind` must be a class of this page, never a name from the server. */
function bar(kind, start, length, whole) {
  const element = make("i", kind), part = Math.min(1, Math.max(0, start / whole));
  element.style.left = `${part * 100}%`;
  if (length !== null) element.style.width = `${Math.min(1 - part, length / whole) * 100}%`;
  return element;
}

const KINDS = ["tokenize", "queue", "routing", "waiting", "prefill", "transfer", "decode", "migration"];

/** Rounds costs to four digits. Counts stay as they are. */
function rounded(value) {
  return Number.isInteger(value) ? value : Number(value.toPrecision(4));
}

function spanRow({name, worker, start_s: start, seconds: length, attributes}, whole) {
  const element = bar(KINDS.includes(name) ? name : "", start, length, whole);
  const more = Object.entries(attributes || {}).map(([key, value]) =>
    `${key.replaceAll("_", " ")} ${typeof value === "number" ? rounded(value) : value}`);
  element.title = [`${name} from ${seconds(start)} on`, worker && `at ${worker}`, ...more].filter(Boolean).join(", ");
  const detail = [worker, ...more].filter(Boolean).join(", ");
  return row(name, detail, make("div", "track", element), seconds(length));
}

function tokenRow(tokens, whole) {
  const ticks = tokens.map(([at]) => bar("token", at, null, whole));
  return row("tokens", String(tokens.reduce((sum, [, count]) => sum + count, 0)), make("div", "track", ...ticks),
    seconds(tokens.at(-1)[0] - tokens[0][0]));
}

/** The gaps between tokens, each as wide and as high as it is long. */
function showGaps(tokens, whole) {
  const gaps = tokens.slice(1).map(([at], i) => ({start: tokens[i][0], end: at, length: at - tokens[i][0]}));
  $("gaps").hidden = !gaps.length;
  if (!gaps.length) return;
  const sorted = gaps.map(gap => gap.length).sort((a, b) => a - b), longest = sorted.at(-1) || 1e-9;
  const median = sorted[Math.floor(sorted.length / 2)], isSlow = gap => gap.length > SLOW * median;
  const svg = draw("svg", {viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img"});
  svg.ariaLabel = "Gaps between tokens";
  for (const [kind, some] of [["", gaps.filter(gap => !isSlow(gap))], ["slow", gaps.filter(isSlow)]]) {
    const d = some.map(({start, end, length}) =>
      `M${(start / whole * 1000).toFixed(2)} 100V${(100 - length / longest * 96).toFixed(1)}`
      + `H${(end / whole * 1000).toFixed(2)}V100Z`).join("");
    svg.append(draw("path", {class: kind, d}));
  }
  const shownGap = make("span"), worst = gaps.reduce((a, b) => (b.length > a.length ? b : a));
  const show = gap => {
    shownGap.textContent = `${seconds(gap.length)} after ${seconds(gap.start)}`;
  };
  svg.onpointermove = event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * whole;
    const gap = gaps.find(one => one.start <= at && at <= one.end);
    if (gap) show(gap);
  };
  svg.onpointerleave = () => show(worst);
  show(worst);
  const slow = gaps.filter(isSlow).length;
  const caption = make("figcaption", "", "decode gaps", make("em", "", `median ${seconds(median)}`),
    make("em", "", slow ? `${slow} slow` : "none slow"));
  const axis = make("small", "", shownGap, `top ${seconds(longest)}`);
  $("gaps").replaceChildren(caption, make("div", "", svg, axis));
}
