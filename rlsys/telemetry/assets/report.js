// A chart is {title, names or match}: the series that the run has are drawn, a chart without any is left out.
const SECTIONS = {
  Learning: [
    { title: "Reward", names: { "critic/score/mean": "score", "critic/rewards/mean": "with penalties" }, same: true },
    { title: "Validation", match: /^val-core\/.*(?<!\/std)$/, short: name => name.slice(9), marks: true },
    { title: "Loss", names: { "train/loss": "training", "val/loss": "validation" } },
    { title: "Accuracy", names: { "train/accuracy": "training", "val/accuracy": "validation" } },
    { title: "Response length", names: { "response_length/mean": "mean", "response_length/max": "longest", "response_length/min": "shortest" }, unit: "tokens" },
    { title: "Answers cut off or aborted", names: { "response_length/clip_ratio": "cut off", "response/aborted_ratio": "aborted" } },
    { title: "Answers in groups of equal scores", names: { "critic/score/frac_zero_std": "share" } },
    { title: "Answers that could not be graded", names: { "reward/errors": "errors", "reward/timeouts": "timeouts" } },
  ],
  Optimization: [
    { title: "Entropy", names: { "actor/entropy": "entropy" } },
    { title: "KL", names: { "actor/ppo_kl": "to the old policy", "actor/kl_loss": "to the reference (loss)", "actor/reward_kl_penalty": "to the reference (penalty)", "rollout_corr/kl": "to the rollout" } },
    { title: "Clip fraction", names: { "actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "clipped below", "critic/vf_clipfrac": "values" } },
    { title: "Gradient norm", names: { "actor/grad_norm": "actor", "critic/grad_norm": "critic", "train/grad_norm": "model" }, log: true },
    { title: "Policy loss", names: { "actor/pg_loss": "policy", "actor/loss": "all" } },
    { title: "Value loss", names: { "critic/vf_loss": "values" } },
    { title: "Explained variance", names: { "critic/vf_explained_var": "values" } },
    { title: "Advantages", names: { "critic/advantages/max": "highest", "critic/advantages/mean": "mean", "critic/advantages/min": "lowest" } },
    { title: "Learning rate", names: { "actor/lr": "actor", "critic/lr": "critic", "train/lr": "model" } },
  ],
  "Rollout and trainer": [
    { title: "Parity of log-probabilities", names: { "parity/max_abs": "largest", "parity/mean_abs": "mean", "parity/sampled_mean_abs": "mean, sampled" }, log: true, marks: true },
    { title: "Probability difference", names: { "training/rollout_probs_diff_max": "largest", "training/rollout_probs_diff_mean": "mean" }, log: true },
    { title: "Staleness", names: { "training/staleness": "versions behind" } },
  ],
  Episodes: [
    { title: "Turns", names: { "agent/num_turns/mean": "mean" } },
    { title: "Ends of episodes", match: /^agent\/end\//, short: name => name.slice(10) },
    { title: "Time of an episode", names: { "agent/episode_seconds/mean": "mean" }, unit: "s" },
    { title: "Share of time in tools", names: { "agent/tool_time_share": "tools" } },
  ],
  "Time and memory": [
    { title: "Time by stage", stack: true, unit: "s" },
    { title: "Throughput", names: { "perf/throughput": "tokens per second and device" } },
    { title: "Model FLOPs utilization", names: { "perf/mfu/actor": "update", "perf/mfu/actor_infer": "log-probs", "perf/mfu/critic": "critic" } },
    { title: "Memory", names: { "perf/max_memory_reserved_gb": "GPU, reserved", "perf/max_memory_allocated_gb": "GPU, allocated", "perf/cpu_memory_used_gb": "host" }, unit: "GiB", same: true },
    { title: "Highest memory by stage", match: /^perf\/memory\/.*\/(cuda|rss)_peak_gb$/, short: name => name.split("/")[2], unit: "GiB", only: 6 },
  ],
};
const AXES = { step: "step", tokens: "tokens", time: "hours" };
const MARGIN = { left: 46, right: 8, top: 8, bottom: 20 };
const LINES = 8;

const run = JSON.parse($("data").textContent);
const runs = [asRun(run)];
const state = fromAddress({ smooth: run.steps.length > 200 ? "0.9" : run.steps.length > 40 ? "0.7" : "0", axis: "step", q: "", from: "", to: "", wide: "" });
const flipTheme = useTheme(state);
let cards = [];

function asRun({ title, steps, columns, every }) {
  const sums = name => { let total = 0; return (columns[name] || steps.map(() => 0)).map(v => (total += (v || 0) * (every || 1))); };
  const axes = { step: steps, tokens: sums("perf/total_num_tokens"), time: sums("perf/time_per_step").map(s => s / 3600) };
  return { title, steps, columns: { ...columns, ...stages(columns, steps.length) }, axes };
}

// timing_s/* holds nested stages: `source` covers the gen and reward of training, `testing` those of validation.
function stages(columns, length) {
  const seconds = name => columns["timing_s/" + name] || [];
  const inside = new Set(["step", "source", "gen", "reward", "start_workers", "connect", "load_checkpoint"]);
  const parts = Object.fromEntries(Object.keys(columns).filter(n => n.startsWith("timing_s/") && !inside.has(n.slice(9))).map(n => ["stage/" + n.slice(9), columns[n]]));
  const source = Array.from({ length }, (_, i) => seconds("source")[i] || 0);
  const share = i => { const all = (seconds("gen")[i] || 0) + (seconds("reward")[i] || 0); return all ? (seconds("gen")[i] || 0) / all : 1; };
  if (source.some(s => s > 0)) parts["stage/gen"] = source.map((s, i) => s * share(i)), parts["stage/reward"] = source.map((s, i) => s * (1 - share(i)));
  return parts;
}

function readRun(name, text) {
  const embedded = text.match(/<script type="application\/json" id="data">(.*?)<\/script>/s);
  if (embedded) return asRun(JSON.parse(embedded[1]));
  const whole = line => { try { return [JSON.parse(line)]; } catch { return []; } };
  const records = whole(text).length ? whole(text) : text.split("\n").flatMap(whole);
  const columns = {};
  records.forEach((record, i) => Object.entries(record).forEach(([key, value]) => {
    if (isNumber(value) && key !== "step") (columns[key] ??= Array(records.length).fill(null))[i] = value;
  }));
  if (!Object.keys(columns).length) throw new Error(name + " holds no metrics");
  return asRun({ title: name, steps: records.map((r, i) => r.step ?? i), columns });
}

function smoothed(values) {
  const weight = Number(state.smooth);
  let sum = 0, norm = 0;
  return values.map(v => { sum = weight * sum + (1 - weight) * v; norm = weight * norm + 1 - weight; return sum / norm; });
}

function seriesOf(spec) {
  const all = [...new Set(runs.flatMap(r => Object.keys(r.columns)))];
  let names = spec.stack ? all.filter(n => n.startsWith("stage/")) : spec.names ? Object.keys(spec.names).filter(n => all.includes(n)) : all.filter(n => spec.match.test(n));
  if (spec.stack) {
    const whole = names.reduce((sum, n) => sum + total(n), 0);
    names = names.filter(n => total(n) > .005 * whole).sort((a, b) => total(b) - total(a));
  }
  if (spec.only) names = names.sort((a, b) => total(b) - total(a)).slice(0, spec.only);
  if (spec.same) names = names.filter((n, i) => i === 0 || runs.some(r => (r.columns[n] || []).some((v, k) => isNumber(v) && v !== 0 && v !== (r.columns[names[0]] || [])[k])));
  const short = shortened(spec.short ? names.map(spec.short) : []);
  const label = n => spec.names?.[n] ?? (spec.stack ? n.slice(6) : spec.short ? short(spec.short(n)) : n);
  if (!spec.always) names = names.filter(n => runs.some(r => r.columns[n]?.some(v => isNumber(v) && v !== 0)));
  return names.slice(0, spec.stack ? 12 : LINES).flatMap((name, hue) => runs.map((r, at) => {
    const kept = (r.columns[name] || []).map((y, i) => [r.axes[state.axis][i], y]).filter(([, y]) => isNumber(y));
    return { name, label: label(name), run: at, hue: names.length === 1 ? at : hue, points: kept };
  })).filter(s => s.points.length && (!spec.stack || s.run === 0));
}
// What the labels have in common at their start, up to a slash, says nothing.
function shortened(labels) {
  let start = labels[0] || "";
  for (const text of labels) while (!text.startsWith(start)) start = start.slice(0, -1);
  const cut = labels.length > 1 ? start.lastIndexOf("/") + 1 : 0;
  return text => text.slice(cut);
}
const total = name => runs[0].columns[name] ? runs[0].columns[name].reduce((a, b) => a + (b || 0), 0) : 0;
const paint = s => `var(--c${s.hue % 8})`;

function makeCard(spec) {
  const series = seriesOf(spec);
  if (!series.length) return null;
  const legend = el("div", { className: "legend num" }), picture = svg("svg", { role: "img", "aria-label": spec.title });
  const sources = [...new Set(series.map(s => s.name))];
  const source = el("span", { className: "source num", title: spec.stack ? "timing_s/*" : sources.filter(n => n !== spec.title).join("\n") });
  const widen = () => go({ wide: state.wide === spec.title ? "" : spec.title });
  const node = el("article", { className: "card" + (state.wide === spec.title ? " wide" : "") },
    el("div", { className: "head" }, el("button", { textContent: spec.title, title: "widen", onclick: widen }), source), legend, picture);
  const card = { spec, series, node, legend, source, picture };
  picture.onpointermove = event => hover(card.toX(event));
  picture.onpointerleave = () => hover(null);
  picture.onpointerdown = event => brush(card, event);
  return card;
}

function draw(card) {
  const { spec, series, picture } = card;
  const width = picture.clientWidth || 400, height = picture.clientHeight || 190, right = width - MARGIN.right, bottom = height - MARGIN.bottom;
  const [x0, x1] = domain();
  const X = x => MARGIN.left + (right - MARGIN.left) * (x - x0) / (x1 - x0 || 1);
  card.toX = event => x0 + (x1 - x0) * clamp((event.clientX - picture.getBoundingClientRect().left - MARGIN.left) / (right - MARGIN.left));
  card.X = X;
  const lines = spec.stack ? stacked(series) : series.map(s => ({ s, raw: s.points, smooth: smooth(s, spec) }));
  const seen = lines.flatMap(l => [...l.smooth, ...(spec.stack ? [] : robust(l.raw))]).filter(([x]) => x >= x0 && x <= x1).map(p => p[1]);
  const log = spec.log && seen.length && seen.every(v => v > 0) && extent(seen)[1] / extent(seen)[0] > 30;
  const f = v => log ? Math.log10(v) : v;
  let [low, high] = seen.length ? extent(seen.map(f)) : [0, 1];
  if (spec.stack) low = 0;
  if (high - low < 1e-12) [low, high] = [low - Math.max(1e-9, Math.abs(low) * .1), high + Math.max(1e-9, Math.abs(high) * .1)];
  const pad = (high - low) * .06;
  if (!spec.stack && !(low >= 0 && low < pad)) low -= pad;
  high += pad;
  const Y = v => bottom - (bottom - MARGIN.top) * (f(Math.max(v, log ? 10 ** low : v)) - low) / (high - low);
  const path = points => points.map(([x, y]) => `${X(x).toFixed(1)},${Math.max(-20, Math.min(height + 20, Y(y))).toFixed(1)}`).join(" ");
  const clip = "clip" + cards.indexOf(card);
  const parts = [svg("clipPath", { id: clip }, svg("rect", { x: MARGIN.left - 1, y: 0, width: Math.max(0, right - MARGIN.left + 5), height: bottom + 2 }))];
  for (const v of log ? decades(low, high) : ticks(low, high, 5)) {
    const y = bottom - (bottom - MARGIN.top) * (v - low) / (high - low);
    if (y < MARGIN.top - 4 || y > bottom + 1) continue;
    parts.push(svg("line", { class: "rule", x1: MARGIN.left, x2: right, y1: y, y2: y }), svg("text", { x: MARGIN.left - 6, y: y + 3.5, "text-anchor": "end" }, brief(log ? 10 ** v : v)));
  }
  for (const v of ticks(x0, x1, Math.max(2, width / 75))) parts.push(svg("text", { x: X(v), y: height - 5, "text-anchor": "middle" }, brief(v)));
  const body = svg("g", { "clip-path": `url(#${clip})` });
  for (const { s, raw, smooth, base } of lines) {
    if (spec.stack) { body.append(svg("polygon", { class: "area", fill: paint(s), points: path(smooth) + " " + path([...base].reverse()) })); continue; }
    const style = { stroke: paint(s), ...(s.run ? { "stroke-dasharray": "5 3" } : {}) };
    if (raw !== smooth) body.append(svg("polyline", { class: "raw", stroke: paint(s), points: path(raw) }));
    body.append(svg("polyline", { class: "line", points: path(smooth), ...style }));
    if (spec.marks || raw.length === 1) for (const [x, y] of raw.length > 60 ? [] : raw) body.append(svg("circle", { cx: X(x), cy: Y(y), r: 2.5, fill: paint(s) }));
  }
  card.cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
  picture.replaceChildren(...parts, body, card.cursor);
}

const decades = (low, high) => {
  const found = [];
  for (let d = Math.floor(low); d <= high; d++) for (const k of high - low < 2.2 ? [1, 2, 5] : [1]) found.push(d + Math.log10(k));
  return found.filter(v => v >= low && v <= high);
};
const smooth = (s, spec) => {
  if (spec.marks || Number(state.smooth) === 0 || s.points.length < 5) return s.points;
  const values = smoothed(s.points.map(p => p[1]));
  return s.points.map(([x], i) => [x, values[i]]);
};
// Single spikes must not flatten the curve: the scale leaves out the outer 1 % of the raw values.
const robust = points => { const ys = points.map(p => p[1]).sort((a, b) => a - b), cut = Math.floor(ys.length / 100); return points.filter(p => p[1] >= ys[cut] && p[1] <= ys[ys.length - 1 - cut]); };

// Bars without gaps: each reaches half way to its neighbours.
function stacked(series) {
  const xs = [...new Set(series.flatMap(s => s.points.map(p => p[0])))].sort((a, b) => a - b);
  const level = new Map(xs.map(x => [x, 0]));
  const between = (i, by) => xs[i + by] === undefined ? xs[i] + by * (xs.length > 1 ? Math.abs(xs[i] - xs[i - by]) : 1) / 2 : (xs[i] + xs[i + by]) / 2;
  const outline = () => xs.flatMap((x, i) => [[between(i, -1), level.get(x)], [between(i, 1), level.get(x)]]);
  return series.map(s => {
    const values = new Map(s.points), base = outline();
    xs.forEach(x => level.set(x, level.get(x) + (values.get(x) || 0)));
    return { s, raw: s.points, base, smooth: outline() };
  });
}

function domain() {
  if (state.from !== "" && state.to !== "") return [Number(state.from), Number(state.to)];
  const [low, high] = extent(runs.flatMap(r => r.axes[state.axis]));
  return isFinite(low) ? [low, high > low ? high : low + 1] : [0, 1];
}
const brief = v => Math.abs(v) >= 1e9 ? +(v / 1e9).toPrecision(3) + "B" : Math.abs(v) >= 1e6 ? +(v / 1e6).toPrecision(3) + "M" : Math.abs(v) >= 1e4 ? +(v / 1e3).toPrecision(3) + "k" : show(+v.toPrecision(6));

// The value of every series at x, or its last one; the runs' values of a metric stand beside each other.
function describe(card, x) {
  const entries = Map.groupBy(card.series, s => s.name);
  card.legend.replaceChildren(...[...entries.values()].map(group => el("span", {}, ...group.flatMap((s, at) => {
    const point = x === null ? s.points[s.points.length - 1] : s.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    const mark = el("i", { className: s.run ? "other" : "" });
    mark.style.background = mark.style.borderColor = paint(s);
    return [mark, at ? "" : s.label, el("b", { textContent: show(point[1]) })];
  }))));
  card.source.textContent = x === null ? card.source.title.split("\n").length === 1 ? card.source.title : card.spec.unit || "" : `${AXES[state.axis]} ${show(+x.toPrecision(5))}`;
}

function hover(x) {
  if (x !== null && state.axis === "step") x = Math.round(x);
  for (const card of cards) {
    if (card.cursor) for (const [name, value] of Object.entries(x === null ? { visibility: "hidden" } : { x1: card.X(x), x2: card.X(x), visibility: "visible" })) card.cursor.setAttribute(name, value);
    describe(card, x);
  }
}

function brush(card, down) {
  if (down.button) return;
  const start = card.toX(down), area = svg("rect", { class: "brush", y: MARGIN.top, height: card.picture.clientHeight - MARGIN.top - MARGIN.bottom });
  card.picture.append(area);
  card.picture.setPointerCapture(down.pointerId);
  const span = event => [start, card.toX(event)].sort((a, b) => a - b);
  card.picture.onpointermove = event => { const [a, b] = span(event); area.setAttribute("x", card.X(a)); area.setAttribute("width", card.X(b) - card.X(a)); };
  card.picture.onpointerup = event => {
    card.picture.onpointerup = null;
    card.picture.onpointermove = moved => hover(card.toX(moved));
    area.remove();
    const [a, b] = span(event);
    if (card.X(b) - card.X(a) > 6) go({ from: String(+a.toPrecision(6)), to: String(+b.toPrecision(6)) });
  };
}

function tile(name, value, note, before) {
  const big = el("div", { className: "value num" });
  if (before !== undefined) big.append(el("small", { textContent: before + " →" }));
  big.append(value);
  return el("div", { className: "tile" }, el("h2", { textContent: name }), big, el("div", { className: "note num", textContent: note, title: note }));
}

function renderTiles() {
  const r = runs[0], column = name => (r.columns[name] || []).map((v, i) => [r.steps[i], v]).filter(p => isNumber(p[1]));
  const [score, loss, tokens, time, length] = ["critic/score/mean", "train/loss", "perf/throughput", "perf/time_per_step", "response_length/mean"].map(column);
  const validation = Object.keys(r.columns).filter(n => n.startsWith("val-core/")).sort((a, b) => b.includes("/mean@") - a.includes("/mean@"))[0] || (r.columns["val/loss"] ? "val/loss" : "");
  const checked = validation ? column(validation) : [], tiles = [];
  const change = (name, points, note) => tiles.push(tile(name, show(points[points.length - 1][1]), note, points.length > 1 ? show(points[0][1]) : undefined));
  if (score.length) change("Reward", score, `best ${show(extent(score.map(p => p[1]))[1])} at step ${score.reduce((a, b) => b[1] > a[1] ? b : a)[0]}`);
  if (loss.length) change("Loss", loss, `lowest ${show(extent(loss.map(p => p[1]))[0])}`);
  if (checked.length) {
    const better = validation === "val/loss" ? (a, b) => b[1] < a[1] : (a, b) => b[1] > a[1];
    const best = checked.reduce((a, b) => better(a, b) ? b : a);
    change("Validation", checked, `${checked.length > 1 ? `best ${show(best[1])} at step ${best[0]} · ` : ""}${validation.replace("val-core/", "")}`);
  }
  if (length.length) change("Response length", length, "tokens, mean");
  if (tokens.length) tiles.push(tile("Speed", grouped(mean(tokens.slice(-20).map(p => p[1]))), "tokens per second and device"));
  if (time.length) {
    const each = mean(time.slice(-20).map(p => p[1])), left = run.total ? Math.max(0, run.total - r.steps[r.steps.length - 1]) : 0;
    tiles.push(tile("Time per step", duration(each), left && run.running ? `${duration(each * left)} left` : `${duration(r.axes.time[r.axes.time.length - 1] * 3600)} of training`));
  }
  $("tiles").replaceChildren(...tiles);
  $("tiles").hidden = !tiles.length;
}
function duration(s) {
  const two = v => String(Math.floor(v)).padStart(2, "0");
  return s < 9.95 ? `${s.toFixed(s < .995 ? 2 : 1)} s` : s < 59.5 ? `${s.toFixed(0)} s` : s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)} min` : `${Math.floor(s / 3600)}:${two(s / 60 % 60)} h`;
}

function renderTools() {
  $("smooth").value = state.smooth;
  $("smooth-value").textContent = Number(state.smooth) ? Number(state.smooth).toFixed(2) : "off";
  $("axis").replaceChildren(...Object.entries(AXES).filter(([name]) => name === "step" || extent(runs[0].axes[name])[1] > 0).map(([name, text]) =>
    el("button", { textContent: text, onclick: () => go({ axis: name, from: "", to: "" }), aria: { pressed: String(state.axis === name) } })));
  if (document.activeElement !== $("q")) $("q").value = state.q;
  $("reset").hidden = state.from === "";
  $("runs").replaceChildren(...(runs.length < 2 ? [] : runs).map((r, at) => el("span", { className: "run" },
    svg("svg", {}, svg("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke: `var(--c${at})`, "stroke-width": 2, ...(at ? { "stroke-dasharray": "5 3" } : {}) })),
    at ? el("input", { value: r.title, size: Math.max(4, r.title.length), title: "name of the run", onchange: event => { r.title = event.target.value; render(); } }) : r.title,
    ...(at ? [el("button", { textContent: "✕", aria: { label: "remove " + r.title }, onclick: () => { runs.splice(at, 1); render(); } })] : []))));
}

function renderCharts() {
  const q = state.q.toLowerCase(), all = Object.keys(runs[0].columns).filter(n => !n.startsWith("stage/"));
  const groups = q ? { [`Metrics with “${state.q}”`]: all.filter(n => n.toLowerCase().includes(q)).slice(0, 60).map(n => ({ title: n, names: { [n]: "" }, always: true })) } : SECTIONS;
  cards = [];
  const parts = Object.entries(groups).flatMap(([title, specs]) => {
    const made = specs.map(makeCard).filter(Boolean);
    const flat = specs.filter(spec => seriesOf({ ...spec, always: true }).length && !made.some(c => c.spec === spec)).map(spec => spec.title.toLowerCase());
    cards.push(...made);
    const note = flat.length ? [el("p", { className: "flat faint", textContent: `0 in all steps: ${flat.join(", ")}` })] : [];
    return made.length ? [el("section", {}, el("h2", { textContent: title }), el("div", { className: "grid" }, ...made.map(c => c.node)), ...note)] : [];
  });
  if (q && !cards.length) parts.push(el("p", { className: "empty", textContent: "no metric of that name" }));
  if (!q && all.length) parts.push(el("details", {}, el("summary", { textContent: `all ${all.length} metrics` }), table(all)));
  if (!all.length) parts.push(el("p", { className: "empty", textContent: "no step has been recorded yet" }));
  $("charts").replaceChildren(...parts);
  cards.forEach(card => describe(card, null));
  cards.forEach(draw);
}

function table(names) {
  const head = ["metric", "first", "last", "lowest", "highest", ...runs.slice(1).map(r => r.title)];
  const rows = names.sort().map(name => {
    const values = runs[0].columns[name].filter(isNumber), others = runs.slice(1).map(r => (r.columns[name] || []).filter(isNumber).pop());
    const link = el("a", { href: "#", textContent: name, onclick: event => { event.preventDefault(); go({ q: name }); scrollTo(0, 0); } });
    return el("tr", {}, el("td", {}, link), ...[values[0], values[values.length - 1], ...extent(values), ...others].map(v => el("td", { className: "num", textContent: isNumber(v) ? show(v) : "" })));
  });
  return el("div", { className: "scroll" }, el("table", {}, el("tr", {}, ...head.map(text => el("th", { textContent: text }))), ...rows));
}

// One measurement, an evaluation: figures say more than dots.
function renderFigures() {
  const [core, rest] = [n => n.startsWith("val-core/"), n => !n.startsWith("val-core/")].map(test => Object.keys(runs[0].columns).filter(test).sort());
  const value = (r, name) => (r.columns[name] || []).filter(isNumber).pop();
  const rows = names => names.map(name => {
    const meter = v => { const bar = el("i"); bar.style.width = `${100 * clamp(v)}%`; return v >= 0 && v <= 1 ? [el("span", { className: "meter" }, bar)] : []; };
    return el("tr", {}, el("td", { textContent: name.replace(/^val-(core|aux)\//, "") }), ...runs.map(r => value(r, name)).map(v => isNumber(v) ? el("td", { className: "num" }, show(v), ...meter(v)) : el("td")));
  });
  const head = el("tr", {}, el("th", { textContent: "metric" }), ...runs.map(r => el("th", { textContent: r.title })));
  const whole = names => el("div", { className: "scroll" }, el("table", {}, head.cloneNode(true), ...rows(names)));
  const parts = [core.length ? el("section", {}, el("h2", { textContent: "Result" }), whole(core)) : el("section"), rest.length ? el("details", { open: !core.length }, el("summary", { textContent: `${rest.length} more figures` }), whole(rest)) : ""];
  cards = [];
  $("charts").replaceChildren(...parts);
}

function render() {
  renderTiles();
  renderTools();
  if (Math.max(...runs.map(r => r.steps.length)) === 1 && !run.total) renderFigures(); else renderCharts();
}
function go(change) { Object.assign(state, change); toAddress(state); render(); }

async function open(files) {
  for (const file of files) {
    try { runs.push(readRun(file.name, await file.text())); } catch (error) { alert(`${file.name} cannot be read: ${error.message}`); }
  }
  render();
}

document.title = $("title").textContent = run.title;
const ago = (Date.now() / 1000 - run.updated) / 60;
$("status").textContent = [run.total ? `step ${grouped(run.steps[run.steps.length - 1] || 0)} of ${grouped(run.total)}` : "", run.running ? `running, written ${ago < 1.5 ? "just now" : duration(ago * 60) + " ago"}` : "ended", run.every > 1 ? `each point is the mean of ${run.every} steps` : ""].filter(Boolean).join(" · ");
$("links").replaceChildren(...run.links.map(([text, href]) => el("a", { href, textContent: text })));
for (const id of ["smooth", "q"]) $(id).oninput = () => go({ [id]: $(id).value });
$("reset").onclick = () => go({ from: "", to: "" });
$("file").onchange = () => open($("file").files);
$("compare").onkeydown = event => { if (event.key === "Enter" || event.key === " ") $("file").click(); };
document.addEventListener("dragover", event => { event.preventDefault(); document.body.classList.add("dropping"); });
document.addEventListener("dragleave", event => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
document.addEventListener("drop", event => { event.preventDefault(); document.body.classList.remove("dropping"); open(event.dataTransfer.files); });
const bySmoothing = by => () => go({ smooth: String(Math.min(.98, Math.max(0, Math.round((Number(state.smooth) + by) * 100) / 100))) });
const nextAxis = () => { const names = [...$("axis").children]; names[(names.findIndex(b => b.getAttribute("aria-pressed") === "true") + 1) % names.length].click(); };
useKeys({ s: bySmoothing(.1), S: bySmoothing(-.1), x: nextAxis, "/": () => $("q").focus(), o: () => $("file").click(), t: flipTheme, Escape: () => go({ from: "", to: "", q: "" }) });
let frame = 0;
addEventListener("resize", () => { cancelAnimationFrame(frame); frame = requestAnimationFrame(() => cards.forEach(draw)); });
// A run that is written just now is read again, unless the reader compares, zooms or searches.
if (run.running && ago < 10) setInterval(() => { if (runs.length === 1 && state.from === "" && document.visibilityState === "visible" && document.activeElement !== $("q")) location.reload(); }, 30000);
render();
