const ROW_HEIGHT = 56, BINS = 24, MOST_STEPS = 200, MOST_PROMPTS = 400;
const VIEWS = { sample: "samples", prompts: "prompts", pair: "side by side" };

let steps = [];
const loaded = new Map(), texts = new Map(), asked = new Set();
const state = fromAddress({ step: "", row: "", view: "sample", q: "", regex: "", low: "", high: "", short: "", long: "", part: "", partlow: "", parthigh: "", prompt: "", all: "", sort: "index", order: "", colour: "", unfold: "", pin: "", history: "" });
const flipTheme = useTheme(state);

window.rlsysRollouts = {
  steps(list) { steps = list; },
  step(data) {
    data.rows = data.prompt.map((prompt, index) => ({ index, prompt, score: data.score[index], length: data.length[index] }));
    data.places = new Map(data.kept.map((index, at) => [index, at]));
    data.groups = Map.groupBy(data.rows, row => row.prompt);
    loaded.set(data.step, data);
    render();
  },
  async texts(step, packed) {
    const bytes = Uint8Array.from(atob(packed), c => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    texts.set(step, JSON.parse(await new Response(stream).text()));
    render();
  },
};

function load(file) {
  const script = el("script", { src: file });
  script.onerror = () => $("detail").replaceChildren(el("p", { className: "empty", textContent: "cannot read " + file }));
  document.head.append(script);
  return script;
}
const ask = file => { if (!asked.has(file)) { asked.add(file); load(file); } };
const want = step => { ask(`browser/${step}.js`); return loaded.get(step); };
const wantTexts = step => { ask(`browser/${step}.texts.js`); return texts.get(step); };

function go(change) {
  Object.assign(state, change);
  toAddress(state);
  render();
}
const current = () => steps.find(s => String(s.step) === state.step) || steps[steps.length - 1];

// A row with its texts, if they were kept.
function whole(data, row) {
  const known = texts.get(data.step), place = data.places;
  const input = known ? known.prompts[row.prompt] : data.prompts[row.prompt][1];
  const kept = known && place.has(row.index) ? known.rows[place.get(row.index)] : {};
  return { output: "", values: {}, extras: {}, ...kept, ...row, input, messages: known?.messages[row.prompt], hasText: Boolean(known) && place.has(row.index) };
}

function matcher() {
  if (state.q === "") return { test: null };
  try {
    if (!state.regex) return { test: text => text.toLowerCase().includes(state.q.toLowerCase()) };
    const pattern = new RegExp(state.q, "is");
    return { test: text => pattern.test(text) };
  } catch { return { test: () => false, wrong: true }; }
}

function matching(data) {
  const within = (v, low, high) => low === "" && high === "" || isNumber(v) && v >= (low === "" ? -Infinity : Number(low)) && v <= (high === "" ? Infinity : Number(high));
  const { test } = matcher(), known = texts.get(data.step), part = data.parts[state.part];
  const prompt = state.prompt === "" ? -1 : data.prompts.findIndex(p => p[0] === state.prompt);
  const found = data.rows.filter(row =>
    within(row.score, state.low, state.high) && within(row.length, state.short, state.long) && (prompt < 0 || row.prompt === prompt) &&
    (!part || within(part[row.index], state.partlow, state.parthigh)) &&
    Object.entries(data.about).every(([name, values]) => !state["is_" + name] || values[row.index] === state["is_" + name]) &&
    (!test || known && [w => w.input, w => w.output, w => w.hasText ? show(w.gts) : ""].some(of => test(of(whole(data, row))))));
  const score = row => isNumber(row.score) ? row.score : -Infinity;
  const orders = {
    best: (a, b) => score(b) - score(a), worst: (a, b) => score(a) - score(b), group: (a, b) => a.prompt - b.prompt,
    longest: (a, b) => b.length - a.length, shortest: (a, b) => a.length - b.length,
  };
  return orders[state.sort] ? found.sort((a, b) => orders[state.sort](a, b) || a.index - b.index) : found;
}

function render() {
  const at = current();
  if (!at) { $("detail").replaceChildren(el("p", { className: "empty", textContent: "nothing has been dumped yet" })); return; }
  renderHeader(at);
  const data = want(at.step);
  wantTexts(at.step);
  if (!data) return;
  const rows = matching(data), listed = inList(data, rows);
  const chosen = rows.find(row => String(row.index) === state.row) || listed[0] || rows[0];
  renderColours(data);
  renderTrend(at);
  renderFilters(data, rows);
  renderList(data, rows, listed, chosen, at);
  const main = $("detail");
  main.className = state.view === "pair" ? "pair" : state.view === "prompts" ? "full" : "";
  const nodes = state.view === "prompts" ? promptTable(data, rows) : !chosen ? [el("p", { className: "empty", textContent: "no sample matches the filter" })] : state.view === "pair" ? pair(data, chosen) : detail(data, chosen);
  main.replaceChildren(...nodes);
}

// Rows without their text are in the list only on demand.
const inList = (data, rows) => state.all ? rows : rows.filter(row => data.places.has(row.index));

function renderHeader(at) {
  if ($("step").childElementCount !== steps.length) $("step").replaceChildren(...steps.map(s => el("option", { value: String(s.step), textContent: String(s.step) })));
  $("step").value = String(at.step);
  const facts = [["samples", at.rows], ["mean", at.mean], ["min", at.min], ["max", at.max]];
  $("summary").replaceChildren(...facts.map(([name, value]) => el("span", { textContent: name + " " }, el("b", { textContent: show(value) }))));
  $("views").replaceChildren(...Object.entries(VIEWS).map(([view, text]) => el("button", { textContent: text, onclick: () => go({ view }), aria: { pressed: String(view === state.view) } })));
  for (const [id, by] of [["earlier", -1], ["later", 1]]) $(id).disabled = !steps[steps.indexOf(at) + by];
  for (const id of ["q", "low", "high", "short", "long", "sort"]) if (document.activeElement !== $(id)) $(id).value = state[id];
  $("regex").setAttribute("aria-pressed", String(state.regex !== ""));
  $("q").classList.toggle("wrong", Boolean(matcher().wrong));
}

function renderTrend(at) {
  const known = steps.filter(s => isNumber(s.mean));
  if (known.length < 2) { $("trend").replaceChildren(); return; }
  const width = $("trend").clientWidth || 300, height = 34;
  const [low, high] = extent(known.map(s => s.mean));
  const [first, last] = [known[0].step, known[known.length - 1].step];
  const x = s => 4 + (width - 44) * (s.step - first) / (last - first), y = s => height - 4 - (height - 8) * (high > low ? (s.mean - low) / (high - low) : .5);
  const label = (text, top) => svg("text", { x: width - 34, y: top }, text);
  const parts = [svg("polyline", { points: known.map(s => x(s) + "," + y(s)).join(" ") }), label(high.toPrecision(3), 9), label(low.toPrecision(3), height - 2)];
  if (isNumber(at.mean)) parts.push(svg("circle", { cx: x(at), cy: y(at), r: 3.5 }));
  $("trend").replaceChildren(...parts);
  $("trend").onclick = event => {
    const position = event.clientX - $("trend").getBoundingClientRect().left;
    const nearest = known.reduce((a, b) => Math.abs(x(b) - position) < Math.abs(x(a) - position) ? b : a);
    go({ step: String(nearest.step), row: "" });
  };
}

function renderFilters(data, rows) {
  renderHistogram(data, rows);
  const select = (name, title, options) => {
    const node = el("select", { id: name, onchange: () => go({ [name]: node.value }), aria: { label: title } }, el("option", { value: "", textContent: title }), ...options.map(value => el("option", { value, textContent: value })));
    node.value = state[name] || "";
    return node;
  };
  const number = (name, text) => el("input", { id: name, type: "number", step: "any", placeholder: text, value: state[name], className: "num", onchange: event => go({ [name]: event.target.value }), aria: { label: "part " + text } });
  const abouts = Object.entries(data.about).map(([name, values]) => [name, [...new Set(values)].sort()]).filter(([name, options]) => options.length > 1 || state["is_" + name]);
  const parts = Object.keys(data.parts);
  if (!$("choices").contains(document.activeElement)) $("choices").replaceChildren(
    ...abouts.map(([name, options]) => select("is_" + name, "any " + name.replaceAll("_", " "), options)),
    ...(parts.length ? [el("div", { className: "part" }, select("part", "reward part", parts), number("partlow", "from"), number("parthigh", "to"))] : []));
  const prompt = data.prompts.find(p => p[0] === state.prompt);
  $("chips").replaceChildren(...(state.prompt ? [el("button", { textContent: `✕ prompt ${teaser(prompt ? prompt[1] : "not in this step", 30)}`, onclick: () => go({ prompt: "" }) })] : []));
}

function renderHistogram(data, rows) {
  const scores = data.rows.map(row => row.score).filter(isNumber), [low, high] = extent(scores);
  const width = $("histogram").clientWidth || 290, height = 46, base = height - 11;
  if (scores.length < 2 || low === high) { $("histogram").replaceChildren(); return; }
  const values = [...new Set(scores)].sort((a, b) => a - b), single = values.length <= 8;
  const num = single ? values.length : BINS, bin = v => single ? values.indexOf(v) : Math.min(BINS - 1, Math.floor(BINS * (v - low) / (high - low)));
  const range = i => single ? [values[i], values[i]] : [low + i * (high - low) / BINS, i === BINS - 1 ? high : low + (i + 1) * (high - low) / BINS];
  const count = list => list.reduce((sums, v) => (sums[bin(v)]++, sums), Array(num).fill(0));
  const all = count(scores), hits = count(rows.map(row => row.score).filter(isNumber)), top = Math.max(...all), each = width / num;
  const bars = (sums, name) => sums.map((n, i) => svg("rect", { class: name, x: i * each + 1, width: Math.max(1, Math.min(each - 2, 40)), y: base - (base - 2) * n / top, height: (base - 2) * n / top }));
  const covers = all.map((n, i) => {
    const [from, to] = range(i).map(v => String(+v.toPrecision(6))), node = svg("rect", { class: "hit", x: i * each, y: 0, width: each, height: base }, svg("title", {}, `${from} to ${to}: ${hits[i]} of ${n}`));
    node.onclick = () => go(state.low === from && state.high === to ? { low: "", high: "" } : { low: from, high: to });
    return node;
  });
  const labels = single ? values.map((v, i) => svg("text", { x: i * each + 1, y: height - 1 }, show(v))) : [svg("text", { x: 0, y: height - 1 }, show(low)), svg("text", { x: width, y: height - 1, "text-anchor": "end" }, show(high))];
  $("histogram").replaceChildren(...bars(all, ""), ...bars(hits, "in"), ...covers, ...labels);
}

// Only the rows in sight are made, so that 5,000 cost as little as 50.
function renderList(data, matched, rows, chosen, at) {
  const cut = data.rows.length > data.kept.length;
  $("count").replaceChildren(`${grouped(matched.length)} of ${grouped(data.rows.length)} samples${cut ? state.all ? " " : `, ${grouped(rows.length)} with text ` : ""}`,
    cut ? el("a", { href: "#", textContent: state.all ? "only with text" : "show all", onclick: event => { event.preventDefault(); go({ all: state.all ? "" : "1" }); } }) : "");
  $("export").onclick = () => download(`rollouts-${at.step}.jsonl`, matched.map(row => whole(data, row)).map(({ messages, tokens, hasText, prompt, ...rest }) => JSON.stringify({ step: at.step, ...rest })).join("\n") + "\n");
  const list = $("rows"), view = $("scroll");
  list.style.height = rows.length * ROW_HEIGHT + "px";
  const place = rows.indexOf(chosen);
  if (list.dataset.chosen !== String(chosen?.index) || list.dataset.step !== String(at.step)) {
    if (place * ROW_HEIGHT < view.scrollTop) view.scrollTop = place * ROW_HEIGHT;
    if ((place + 1) * ROW_HEIGHT > view.scrollTop + view.clientHeight) view.scrollTop = (place + 1) * ROW_HEIGHT - view.clientHeight;
    list.dataset.chosen = String(chosen?.index);
    list.dataset.step = String(at.step);
  }
  const paint = () => {
    const first = Math.max(0, Math.floor(view.scrollTop / ROW_HEIGHT) - 5), last = Math.ceil((view.scrollTop + (view.clientHeight || 600)) / ROW_HEIGHT) + 5;
    list.replaceChildren(...rows.slice(first, last).map((row, i) => listItem(data, row, first + i, rows.length, row === chosen, at)));
  };
  view.onscroll = paint;
  paint();
}

function listItem(data, row, position, count, isChosen, at) {
  const part = at.max > at.min ? (row.score - at.min) / (at.max - at.min) : 1, level = el("i"), full = whole(data, row);
  if (isNumber(row.score)) { level.style.height = `${Math.max(6, 100 * clamp(part))}%`; level.style.background = mix(part); }
  const size = `${row.length} ${data.unit === "tokens" ? "tok" : "chars"}`;
  const item = el("li", { onclick: () => go({ row: String(row.index), ...(state.view === "prompts" ? { view: "sample" } : {}) }), aria: { role: "option", selected: String(isChosen), posinset: position + 1, setsize: count } }, el("div", { className: "bar" }, level),
    el("span", { className: "score num", textContent: show(row.score) }), el("span", { className: "about num", textContent: `#${row.index} · ${size}` }),
    el("span", { className: "teaser", textContent: full.hasText ? teaser(full.output) : "prompt: " + teaser(full.input, 28) }));
  item.style.top = position * ROW_HEIGHT + "px";
  return item;
}
const mix = part => `color-mix(in srgb, rgb(var(--good)) ${Math.round(100 * clamp(part))}%, rgb(var(--bad)))`;
// Samples of one prompt begin alike, so the end is shown.
function teaser(text, length = 36) { const plain = text.trim().replace(/\s+/g, " "); return plain === "" ? "(empty)" : plain.length > length ? "… " + plain.slice(-length + 2) : plain; }

// How a per-token column is coloured: surprise for log-probabilities, both sides of zero, or low to high.
function scale(data, name) {
  if (name.includes("log_prob")) return { left: "certain", right: "p < 0.7 %", ramp: "warm", colour: v => tint("warm", clamp(-v / 5)) };
  const values = (texts.get(data.step)?.rows || []).flatMap(row => row.values[name] || []).filter(v => isNumber(v) && (v >= 0 || name !== "weight_versions")).sort((a, b) => a - b);
  if (values[0] < 0) {
    const sizes = values.map(Math.abs).sort((a, b) => a - b), top = sizes[Math.floor(.98 * (sizes.length - 1))] || 1;
    return { left: show(-top), right: show(top), ramp: "both", colour: v => tint(v < 0 ? "bad" : "good", clamp(Math.abs(v) / top)) };
  }
  const low = values[0] || 0, high = values[values.length - 1] || 0;
  return { left: show(low), right: show(high), ramp: "cool", colour: v => tint("cool", high > low ? clamp((v - low) / (high - low)) : 0) };
}
const tint = (name, strength) => strength < .02 ? "" : `rgba(var(--${name}), ${(.75 * strength).toFixed(3)})`;
const ramps = { warm: ["", "warm"], cool: ["", "cool"], both: ["bad", "good"] };
const solid = name => name ? `rgba(var(--${name}), .75)` : "transparent";

const columns = data => [...new Set((texts.get(data.step)?.rows || []).flatMap(row => Object.keys(row.values)))].filter(name => !["token_ids", "turn_ids"].includes(name));
const label = name => name === "advantages" ? "advantage" : name.replaceAll("_", " ").replace(/log probs?/, "log-prob");
function colourOf(data) {
  const names = columns(data);
  return names.includes(state.colour) ? state.colour : state.colour === "none" ? "" : names.find(n => n.includes("log_prob")) || names[0] || "";
}

function renderColours(data) {
  const chosen = colourOf(data), names = columns(data);
  $("colour").replaceChildren(...(names.length ? [...names, ""] : []).map(name => el("button", { textContent: name ? label(name) : "plain", onclick: () => go({ colour: name || "none" }), aria: { pressed: String(name === chosen) } })));
}

// The completion of a row with its legend.
function completion(data, row) {
  if (!row.hasText) return [el("p", { className: "soft", textContent: texts.has(data.step) ? "The text of this sample was not kept: the dump of a step is limited by trainer.rollout_data_max_mb." : "reading the texts …" })];
  const name = colourOf(data), tokens = row.tokens?.length ? row.tokens : null;
  data.scales ??= new Map();
  if (!data.scales.has(name)) data.scales.set(name, scale(data, name));
  const paint = name && tokens ? data.scales.get(name) : null;
  const output = el("div", { id: "output", className: "text output" }, ...(tokens ? answerNodes(row, (text, i) => tokenSpan(row, text, i, name, paint)) : plainText(row.output)));
  const legend = el("div", { className: "legend" });
  if (paint) {
    const ramp = el("i"), [from, to] = ramps[paint.ramp];
    ramp.style.background = `linear-gradient(90deg, ${solid(from)}, transparent ${from ? "50%" : "0%"}, ${solid(to)})`;
    legend.append(el("span", { textContent: label(name) }), el("span", { className: "num", textContent: paint.left }), ramp, el("span", { className: "num", textContent: paint.right }), paint.ramp === "both" ? el("span", { className: "faint", textContent: "below 0 underlined" }) : "");
  }
  return [legend, output];
}

function tokenSpan(row, text, i, name, paint) {
  const span = el("span", { textContent: text });
  const value = name ? (row.values[name] || [])[i] : undefined;
  if (paint && isNumber(value)) span.style.background = paint.colour(value);
  span.className = [text.includes("\n") ? "newline" : "", paint?.ramp === "both" && value < 0 && span.style.background ? "below" : ""].filter(Boolean).join(" ");
  span.onmouseenter = () => {
    const facts = Object.entries(row.values).map(([column, values]) => `${column === "token_ids" ? "id" : label(column)} ${show(values[i])}`);
    $("token").textContent = [JSON.stringify(text), `position ${i}`, ...facts].join("   ");
  };
  return span;
}

function detail(data, chosen) {
  const row = whole(data, chosen), siblings = data.groups.get(row.prompt), scores = siblings.map(other => other.score).filter(isNumber);
  const about = [["sample", row.index], ["step", data.step], [data.unit, row.length], ...Object.entries(data.about).map(([name, values]) => [name.replaceAll("_", " "), values[row.index]])];
  if (scores.length > 1) about.push(["samples of prompt", siblings.length], ["their mean score", mean(scores)]);
  for (const column of columns(data)) {
    const values = (row.values[column] || []).filter(isNumber);
    if (values.length) about.push(["mean " + label(column), mean(values)]);
  }
  const button = (text, onclick) => el("button", { textContent: text, onclick });
  const actions = el("div", { className: "actions" }, button(state.history ? "hide steps" : "over steps", toggleHistory), button("pin to compare", pin), siblings.length > 1 && !state.prompt ? button("only this prompt", () => go({ prompt: data.prompts[row.prompt][0] })) : "");
  return [
    el("section", {}, el("h2", { textContent: "Prompt" }), el("div", { id: "prompt", className: "text prompt" }, ...promptNodes(row.input, row.messages)),
      ...(state.history ? [overSteps(data, row)] : []), el("h2", { textContent: "Completion" }), ...completion(data, row)),
    el("aside", {}, el("section", {}, el("h2", { textContent: "Score" }), el("p", { id: "score", className: "big num", textContent: show(row.score) }), actions),
      siblings.length > 1 ? el("section", {}, el("h2", { textContent: "Samples of the prompt" }), el("p", {}, cells(data, siblings, row.index))) : el("section"),
      row.hasText ? list("Ground truth", [["", row.gts]]) : "", list("Reward parts", Object.entries({ ...Object.fromEntries(Object.entries(data.parts).map(([name, values]) => [name, values[row.index]])), ...row.extras })), list("About", about)),
  ];
}

function list(title, pairs) {
  if (!pairs.length) return el("section");
  const items = pairs.flatMap(([name, value]) => {
    const text = show(value), long = name === "" || text.length > 24;
    return [...(name === "" ? [] : [el("dt", { textContent: name })]), el("dd", { className: long ? "long num" : "num", textContent: text })];
  });
  return el("section", {}, el("h2", { textContent: title }), el("dl", {}, ...items));
}

// The scores of a prompt's samples, high and green or low and red; a click opens one.
function cells(data, rows, now) {
  const [low, high] = extent(data.score.filter(isNumber));
  return el("span", { className: "cells" }, ...rows.map(row => {
    const part = isNumber(row.score) ? high > low ? (row.score - low) / (high - low) : 1 : 0;
    const cell = el("button", { title: `#${row.index}: ${show(row.score)}`, className: [row.index === now ? "now" : "", data.places.has(row.index) ? "" : "bare"].join(" "), onclick: event => { event.stopPropagation(); go({ row: String(row.index), view: "sample" }); }, aria: { label: `sample ${row.index}, score ${show(row.score)}` } });
    cell.style.height = `${Math.max(9, 100 * part)}%`;
    cell.style.background = isNumber(row.score) ? mix(part) : "var(--line)";
    return cell;
  }));
}

function promptTable(data, rows) {
  const groups = [...Map.groupBy(rows, row => row.prompt)].map(([prompt, members]) => {
    const scores = members.map(row => row.score).filter(isNumber), average = scores.length ? mean(scores) : NaN;
    return { prompt, members, "mean score": average, spread: scores.length ? Math.sqrt(mean(scores.map(s => (s - average) ** 2))) : NaN, length: mean(members.map(row => row.length)), samples: members.length };
  });
  const heads = ["mean score", "spread", "length", "samples"], [by, down] = state.order ? state.order.split(":") : ["", ""];
  if (by) groups.sort((a, b) => (down ? -1 : 1) * (a[by] - b[by]) || a.prompt - b.prompt);
  const flat = groups.filter(g => g.samples > 1 && g.spread < 1e-9).length;
  const head = name => el("th", {}, el("button", { textContent: name + (by === name ? down ? " ↓" : " ↑" : ""), aria: { pressed: String(by === name) }, onclick: () => go({ order: by !== name ? `${name}:down` : down ? `${name}:` : "" }) }));
  const body = groups.slice(0, MOST_PROMPTS).map(group => el("tr", { onclick: () => go({ prompt: data.prompts[group.prompt][0], view: "sample", row: String(group.members[0].index) }) },
    el("td", { className: "teaser", textContent: teaser(data.prompts[group.prompt][1], 150) }), el("td", {}, cells(data, group.members.slice(0, 32))), ...heads.map(name => el("td", { className: "num", textContent: isNumber(group[name]) ? show(+group[name].toFixed(4)) : "" }))));
  const more = groups.length > MOST_PROMPTS ? `, the first ${MOST_PROMPTS} are shown` : "";
  return [el("section", { className: "whole" }, el("p", { className: "soft num", textContent: `${grouped(groups.length)} prompts${more} · ${grouped(flat)} with equal scores: nothing to learn from them by comparison` }),
    el("div", { className: "scrolling" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { textContent: "prompt" }), el("th", { textContent: "scores" }), ...heads.map(head))), el("tbody", {}, ...body))))];
}

function pair(data, chosen) {
  const [step, index] = state.pin.split(":").map(Number), at = steps.find(s => s.step === step);
  const side = (name, of, row) => {
    const full = whole(of, row), facts = [`step ${of.step}`, `#${row.index}`, `${row.length} ${of.unit}`, ...Object.values(of.about).map(values => values[row.index])];
    return el("section", {}, el("h2", { textContent: name }), el("p", { className: "big num", textContent: show(row.score) }), el("p", { className: "soft num", textContent: facts.join(" · ") }), el("div", { className: "text prompt" }, fold("prompt", teaser(full.input, 50), ...promptNodes(full.input, full.messages))), ...completion(of, full));
  };
  const other = at && state.pin ? want(step) : null;
  if (other) wantTexts(step);
  const left = other ? side("Pinned", other, other.rows[index]) : el("section", {}, el("h2", { textContent: "Pinned" }), el("p", { className: "soft" }, "Press ", el("kbd", { textContent: "p" }), " on a sample to keep it here, then choose another, also of another step."));
  return [left, side("Chosen", data, chosen)];
}

// All samples of this prompt by step: a point each and a line through the means.
function overSteps(data, row) {
  const digest = data.prompts[row.prompt][0], every = Math.ceil(steps.length / MOST_STEPS);
  const looked = steps.filter((s, i) => i % every === 0 || s.step === data.step), ready = looked.map(s => want(s.step)).filter(Boolean);
  const points = ready.flatMap(of => { const at = of.prompts.findIndex(p => p[0] === digest); return at < 0 ? [] : of.groups.get(at).filter(r => isNumber(r.score)).map(r => ({ step: of.step, row: r })); }).sort((a, b) => a.step - b.step);
  const box = el("div", { className: "history" }, el("h2", { textContent: `This prompt over steps${ready.length < looked.length ? ` (${ready.length} of ${looked.length} steps read)` : every > 1 ? ` (every ${every}th step)` : ""}` }));
  if (!points.length) return box;
  const width = 760, height = 170, bottom = height - 20, [first, last] = extent(points.map(p => p.step)), [low, high] = extent(points.map(p => p.row.score));
  const x = step => 44 + (width - 60) * (last > first ? (step - first) / (last - first) : .5), y = v => bottom - (bottom - 12) * (high > low ? (v - low) / (high - low) : .5);
  const means = [...Map.groupBy(points, p => p.step)].map(([step, group]) => `${x(step)},${y(mean(group.map(p => p.row.score)))}`);
  const dots = points.map(({ step, row: r }) => {
    const dot = svg("circle", { cx: x(step), cy: y(r.score), r: 3.5, ...(step === data.step && r.index === row.index ? { class: "now" } : {}) }, svg("title", {}, `step ${step}, #${r.index}: ${show(r.score)}`));
    dot.onclick = () => go({ step: String(step), row: String(r.index), prompt: digest });
    return dot;
  });
  const rules = ticks(low, high, 4).flatMap(v => [svg("line", { class: "rule", x1: 44, x2: width - 16, y1: y(v), y2: y(v) }), svg("text", { x: 38, y: y(v) + 3, "text-anchor": "end" }, show(+v.toPrecision(5)))]);
  const labels = ticks(first, last, 8).filter(Number.isInteger).map(v => svg("text", { x: x(v), y: height - 4, "text-anchor": "middle" }, show(v)));
  box.append(svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "scores of this prompt by step" }, ...rules, ...labels, svg("polyline", { class: "mean", points: means.join(" ") }), ...dots));
  return box;
}

const toggleHistory = () => go({ history: state.history ? "" : "1", view: "sample" });
function pin() {
  const at = current(), data = at && loaded.get(at.step);
  if (!data) return;
  const rows = inList(data, matching(data)), chosen = data.rows.find(row => String(row.index) === state.row) || rows[0];
  if (chosen) go({ pin: `${at.step}:${chosen.index}`, view: "pair" });
}
function move(by) {
  const at = current(), data = at && loaded.get(at.step);
  if (!data) return;
  const rows = inList(data, matching(data)), place = Math.max(0, rows.findIndex(row => String(row.index) === state.row));
  const next = rows[Math.min(rows.length - 1, Math.max(0, place + by))];
  if (next) go({ row: String(next.index) });
}
function turnStep(by) {
  const next = steps[steps.indexOf(current()) + by];
  if (next) go({ step: String(next.step), row: "" });
}
function cycleColour() {
  const data = current() && loaded.get(current().step), names = data ? [...columns(data), ""] : [];
  if (names.length) go({ colour: names[(names.indexOf(colourOf(data)) + 1) % names.length] || "none" });
}

$("step").onchange = () => go({ step: $("step").value, row: "" });
$("earlier").onclick = () => turnStep(-1);
$("later").onclick = () => turnStep(1);
for (const id of ["q", "low", "high", "short", "long", "sort"]) $(id).oninput = () => go({ [id]: $(id).value });
$("regex").onclick = () => go({ regex: state.regex ? "" : "1" });
useKeys({
  j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1), ArrowLeft: () => turnStep(-1), ArrowRight: () => turnStep(1), c: cycleColour, t: flipTheme,
  g: () => go({ view: state.view === "prompts" ? "sample" : "prompts" }), p: pin, h: toggleHistory, f: () => go({ unfold: state.unfold ? "" : "1" }), "/": () => $("q").focus(), Escape: () => go({ view: "sample", prompt: "" }),
});
let frame = 0;
addEventListener("resize", () => { cancelAnimationFrame(frame); frame = requestAnimationFrame(render); });
load("browser/steps.js").onload = render;
