"use strict";

const PERIOD_MS = 2000;
const CLASSES = ["cached", "written", "uncached", "output"];
const BLOCKS = { tree_blocks: "tree", private_blocks: "private", free_blocks: "free" };
const WORDS = { tree: "in the tree", private: "of running requests", free: "free" };

const byId = (id) => document.getElementById(id);
const count = (value) => Number(value).toLocaleString();
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** Fill a bar with one part per [class, amount], and a list with their words. */
function showParts(bar, legend, parts, words) {
  bar.replaceChildren(...parts.map(([name, amount]) => {
    const part = element("span", undefined, name);
    part.style.flexGrow = amount;
    return part;
  }));
  legend.replaceChildren(...parts.map(([name, amount]) => {
    const entry = element("div");
    entry.append(element("dt", words(name), name), element("dd", count(amount)));
    return entry;
  }));
}

function showTenants(tenants) {
  if (!tenants.length) {
    const cell = element("td", "no requests in the last hour");
    cell.colSpan = 6;
    const row = element("tr");
    row.append(cell);
    byId("tenants").replaceChildren(row);
    return;
  }
  byId("tenants").replaceChildren(...tenants.map((tenant) => {
    const row = element("tr");
    row.append(...[tenant.name, count(tenant.requests), count(tenant.tokens.cached), percent(tenant.hit_rate),
      count(tenant.tokens.output), tenant.cost_usd].map((text) => element("td", text)));
    return row;
  }));
}

function showModels(models) {
  byId("models").replaceChildren(...models.map((model) => {
    const box = element("div");
    const state = model.up ? `${model.running ?? 0} running, ${model.queue ?? 0} waiting` : "away";
    const bar = element("div", undefined, "bar");
    const legend = element("dl", undefined, "legend");
    box.append(element("h3", `${model.name}: ${state}`), bar, legend);
    const parts = Object.entries(BLOCKS).filter(([key]) => key in model.blocks)
      .map(([key, name]) => [name, model.blocks[key]]);
    showParts(bar, legend, parts, (name) => WORDS[name]);
    return box;
  }));
}

function show(data) {
  const ready = data.ready.status === "ready";
  byId("state").textContent = ready ? "ready" : `${data.ready.status}: ${data.ready.message}`;
  byId("state").classList.toggle("bad", !ready);
  byId("hit-rate").textContent = percent(data.total.hit_rate);
  byId("cost").textContent = data.total.cost_usd;
  byId("requests").textContent = count(data.total.requests);
  byId("errors").textContent = `${count(data.total.errors)} failed`;
  showParts(byId("tokens-bar"), byId("tokens"), CLASSES.map((name) => [name, data.total.tokens[name]]), (name) => name);
  showTenants(data.tenants);
  showModels(data.models);
}

async function refresh() {
  try {
    const answer = await fetch("/dashboard/data", { credentials: "same-origin", cache: "no-store" });
    if (answer.status === 401) {
      location.reload();
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
  } catch (error) {
    byId("state").textContent = `no answer from the server (${error.message})`;
    byId("state").classList.add("bad");
  }
  setTimeout(refresh, PERIOD_MS);
}

refresh();
