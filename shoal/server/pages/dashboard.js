"use strict";
// The dashboard: it asks the server at an interval and shows what it says.

const INTERVAL_MS = 2000, PATIENCE_MS = 10000, MOST_REQUESTS = 100;

let points = [];                // of all workers, the last ten minutes
let workerPoints = [];          // of the worker that is shown in detail
let shownWorker = "";           // its id
let shownRequest = "";          // the id of the request whose timeline is open
let asking = null;              // the AbortController of the questions under way

const charts = CHARTS.map(one => new Chart(one)), workerCharts = CHARTS.map(one => new Chart(one));
$("charts").append(...charts.map(({root}) => root));
$("worker-charts").append(...workerCharts.map(({root}) => root));

// Asking the server

async function ask(path) {
  const signal = AbortSignal.any([asking.signal, AbortSignal.timeout(PATIENCE_MS)]);
  const response = await fetch(path, {headers: headers(), signal});
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** Asks for all that is shown. */
async function refresh() {
  asking?.abort();
  const own = asking = new AbortController();
  try {
    const view = await ask(`fleet?since=${points.at(-1)?.at ?? 0}`);
    points = lately([...points, ...(view.history || [])], view.at);
    showView(view);
    if (shownWorker) {
      const since = workerPoints.at(-1)?.at ?? 0;
      const detail = await ask(`fleet?since=${since}&worker=${encodeURIComponent(shownWorker)}`);
      workerPoints = lately([...workerPoints, ...(detail.history || [])], detail.at);
      showWorker(detail);
    }
    showRequests((await ask(`requests?limit=${MOST_REQUESTS}`)).requests);
    if (shownRequest) await showRequest(own.signal);
    trouble("");
  } catch (error) {
    if (own.signal.aborted) return;
    trouble(isLost(error) ? "The server does not answer. Trying again." : error.message);
  }
}

/** Whether this is how fetch says that there is no connection, or no answer in time. */
function isLost(error) {
  return error instanceof TypeError || error.name === "TimeoutError";
}

function lately(found, now) {
  return found.filter(({at}) => at > now - SPAN_S);
}

/** Says what is wrong; what is shown is old then. Nothing is wrong for "". */
function trouble(text) {
  $("notice").hidden = !text;
  document.querySelector("main").classList.toggle("stale", Boolean(text));
  if ($("notice").firstElementChild.textContent !== text) $("notice").firstElementChild.textContent = text;
}

async function follow() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise(resolve => setTimeout(resolve, INTERVAL_MS));
  }
}

// What is shown

/** Rows of a list of terms: [name, text or element]. */
function facts(list, rows) {
  list.replaceChildren(...rows.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
}

/** Fills a table. columns: [heading, row => text or element, class of its cells]. */
function fill(table, columns, rows, nothing) {
  const head = make("tr", "", ...columns.map(([name, , kind]) => make("th", kind || "", name)));
  const body = rows.flatMap(one => {
    const line = make("tr", "", ...columns.map(([, of, kind]) => make("td", kind || "", of(one))));
    if (!one.why) return [line];
    const why = make("td", "", one.why);
    why.colSpan = columns.length;
    return [line, make("tr", "why", why)];
  });
  const focused = table.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  table.replaceChildren(make("thead", "", head), make("tbody", "", ...body));
  if (!rows.length) table.replaceChildren(make("caption", "nothing", nothing));
  if (focused !== null) [...table.querySelectorAll("button")].find(({dataset}) => dataset.id === focused)?.focus();
}

/** A button that opens what has this id. */
function opener(id, text, action) {
  const button = make("button", "", text);
  button.dataset.id = button.title = id;
  button.onclick = () => action(id);
  return button;
}

function showView(view) {
  const ready = view.workers.filter(({state}) => state === "ready").length;
  const kind = view.policy ? `policy ${view.policy}` : "one server";
  const queue = view.policy && view.queue.length ? `, ${view.queue.length} in the queue` : "";
  const behind = view.prefill_queue.length ? `, ${view.prefill_queue.length} for prefill` : "";
  $("status").textContent = `${ready} of ${view.workers.length} ready, ${kind}${queue}${behind}`;
  for (const chart of charts) chart.update(points, view.at);
  showWorkers(view.workers);
  showModels(view.models || []);
  showPlanner(view.planner);
}

function showWorkers(workers) {
  const tiers = ["device", "host", "disk", "store"].filter(name => workers.some(({kv}) => kv[name]));
  const hasRoles = workers.some(({role}) => role !== "both");
  fill($("workers"), [
    ["Worker", one => opener(one.id, one.id, openWorker)],
    ...(hasRoles ? [["Role", one => one.role, "text"]] : []),
    ["State", stateOf, "text"],
    ["Running", one => short(one.running)],
    ["Waiting", one => short(one.waiting)],
    ...tiers.map(name => [`KV ${name}`, one => usage(one.kv[name]), name === "device" ? "" : "minor"]),
    ["Cached", one => orDash(one.recent.hit_rate, percent)],
    ["Output/s", one => short(one.recent.output_tokens_s ?? 0)],
    ["Prompt/s", one => short(one.recent.prompt_tokens_s ?? 0), "minor"],
    ["TTFT", one => orDash(one.recent.ttft?.p50, seconds)],
    ["ITL", one => orDash(one.recent.itl?.p50, seconds)],
    ["ITL p99", one => orDash(one.recent.itl?.p99, seconds), "minor"],
    ["Failed", one => short(one.failed), "minor"],
  ], workers, "There is no worker.");
}

function stateOf({asleep, state}) {
  const shown = asleep && state === "ready" ? "asleep" : state;
  return make("span", shown, shown);
}

function usage(tier) {
  if (!tier) return "–";
  if (tier.usage === null) return `${short(tier.used_blocks)} blocks`;
  const bar = Object.assign(make("meter"), {value: tier.usage, ariaLabel: "in use"});
  return make("span", "", bar, percent(tier.usage));
}

function showModels(models) {
  $("models-part").hidden = models.length < 2;
  fill($("models"), [
    ["Model", one => make("span", "cut", one.name)],
    ["Active", one => short(one.active_requests)],
    ["Output/s", one => short(one.recent.output_tokens_s ?? 0)],
    ["TTFT", one => orDash(one.recent.ttft?.p50, seconds)],
    ["ITL", one => orDash(one.recent.itl?.p50, seconds)],
    ["Cached", one => orDash(one.recent.hit_rate, percent), "minor"],
    ["Failed", one => short(one.failed)],
    ["Refused", one => short(one.refused)],
  ], models, "There is no model.");
}

function showPlanner(planner) {
  $("planner").hidden = !planner;
  if (!planner) return;
  const wanted = Object.entries(planner.desired).map(([role, count]) => `${count} ${role}`).join(", ");
  $("planner-now").textContent = `${planner.mode}: wants ${wanted || "nothing yet"}`
    + `${planner.changing ? ", and changes now" : ""}. ${planner.last_decision}`;
  const decisions = [...planner.decisions].reverse();
  $("decisions").replaceChildren(...decisions.map(({age_s: age, model, what, reason}) =>
    make("li", "", `${seconds(age)} ago: ${what} of ${model}, as ${reason}`)));
}

// One worker

function openWorker(id) {
  shownWorker = id;
  workerPoints = [];
  $("worker-title").textContent = id;
  $("worker").hidden = false;
  $("worker").scrollIntoView({block: "nearest"});
  refresh();
}

function closeWorker() {
  shownWorker = "";
  $("worker").hidden = true;
}

function showWorker(view) {
  for (const chart of workerCharts) chart.update(workerPoints, view.at);
  const one = view.workers.find(({id}) => id === shownWorker);
  if (!one) {
    facts($("worker-facts"), [["State", make("span", "gone", "gone")]]);
    return;
  }
  const tiers = Object.entries(one.kv).map(([name, tier]) => [`KV ${name}`,
    `${orDash(tier.usage, percent)}, ${tier.used_blocks.toLocaleString("en")} blocks`
    + (tier.total_blocks ? ` of ${tier.total_blocks.toLocaleString("en")}` : "")
    + (name === "device" ? "" : `, ${short(tier.stored_blocks)} stored, ${short(tier.fetched_blocks)} fetched`)
    + (tier.failed_blocks ? `, ${short(tier.failed_blocks)} failed` : "")]);
  const failures = Object.entries(one.transfer_failures).map(([kind, count]) => `${count} ${kind}`).join(", ");
  facts($("worker-facts"), [
    ["State", stateOf(one)],
    ...[["Why", one.why], ["Model", one.model], ["Role", one.role], ["Address", one.url],
      ["Process", one.pid], ["Tags", one.tags.join(", ")]].filter(([, text]) => text),
    ...tiers,
    ["Cached", `${orDash(one.recent.hit_rate, percent)} lately, ${percent(one.hit_rate)} since the start`],
    ["KV moved", `${short(one.blocks_in)} blocks (${bytes(one.bytes_in)}) read of others, ${short(one.blocks_out)} `
      + `(${bytes(one.bytes_out)}) read by others${failures ? `; failed: ${failures}` : ""}`],
    ["Since its start", `${short(one.requests)} requests, ${short(one.failed)} failed, ${short(one.preemptions)} preempted, `
      + `${short(one.breaks)} breaks, ${short(one.prefills_done)} prompts for others`],
    ["Weights", `version ${one.weights_version}`],
  ]);
}

// Requests

function showRequests(requests) {
  $("requests-note").textContent = requests.length === MOST_REQUESTS ? `The last ${MOST_REQUESTS} of them.` : "";
  fill($("requests"), [
    ["Request", one => opener(one.id, clock(one.started_at), openRequest)],
    ["Status", one => make("span", one.finish_reason === "abort" ? "aborted" : one.status, one.finish_reason || one.status), "text"],
    ["Model", one => make("div", "cut", one.model), "text minor"],
    ["Worker", one => make("div", "cut", one.workers.join(", ") || "–"), "text minor"],
    ["Prompt", one => short(one.prompt_tokens)],
    ["Cached", one => short(one.cached_tokens), "minor"],
    ["Output", one => short(one.output_tokens)],
    ["TTFT", one => orDash(one.ttft_s, seconds)],
    ["ITL", one => orDash(one.itl_s, seconds)],
    ["Time", one => seconds(one.seconds)],
  ], requests, "There was no request yet.");
}

function openRequest(id) {
  shownRequest = id;
  history.replaceState(null, "", `#request=${encodeURIComponent(id)}`);
  $("line-facts").replaceChildren();
  $("spans").replaceChildren();
  $("gaps").hidden = true;
  $("line").showModal();
  refresh();
}

/** Shows a request. Its errors are shown in its dialog; the rest of the page stays current. */
async function showRequest(signal) {
  const id = shownRequest;
  try {
    const request = await ask(`requests/${encodeURIComponent(id)}`);
    if (shownRequest === id) showLine(request);
  } catch (error) {
    if (signal.aborted || isLost(error)) throw error;
    if (shownRequest === id) facts($("line-facts"), [["Request", id], ["Trouble", error.message]]);
  }
}

$("line").onclose = () => {
  shownRequest = "";
  history.replaceState(null, "", location.pathname);
};
$("close-line").onclick = () => $("line").close();
$("line").onclick = event => { if (event.target === $("line")) $("line").close(); };
$("close-worker").onclick = closeWorker;
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });

followKey(refresh);
const named = new URLSearchParams(location.hash.slice(1)).get("request");
if (named) openRequest(named);
follow();
