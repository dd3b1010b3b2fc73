// The sections of the page, in the order in which a person asks.

const { version, made, runs } = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("report");
const RUN_COLOURS = ["one", "two"];
const several = runs.length > 1;

const PART_WORDS = {
  compute: "Computing: forward, backward, weight gradients, optimizer.",
  communication: "Exposed communication: collectives and send/recv that no computation overlaps.",
  bubble: "Bubble: waiting that this schedule has even if all ranks are equally fast.",
  imbalance: "Imbalance: waiting for a slower rank, at a collective or beyond the bubble.",
  other: "Other: input and bookkeeping between recorded events.",
};
const MEMORY_COLOURS = { parameters: "parameters", gradients: "gradients", optimizer: "state", activations: "activations" };

const section = (title, lead, ...content) => element("section", {}, element("h2", {}, title), lead ? element("p", { class: "lead" }, lead) : null, ...content);
const runName = (run, index) => several ? element("div", { class: "runname" }, element("span", { class: "dot", colour: RUN_COLOURS[index] }), element("h3", {}, run.name)) : null;
const perRun = (make) => element("div", { class: several ? "pair two" : "pair" }, runs.map((run, index) => element("div", {}, runName(run, index), make(run, index))));
const missing = (words) => element("p", { class: "small" }, words);

function head() {
  const badge = (run) => element("span", { class: run.state.finished ? "badge" : "badge stopped" }, (run.state.finished ? "finished: " : "not finished: ") + run.state.text);
  if (!several) {
    const [run] = runs;
    return element("header", { class: "head" },
      element("div", { class: "over" }, "A run of hocket: what was predicted, and what was measured"),
      element("h1", {}, run.name),
      element("p", { class: "words" }, run.model ? `${run.model}, ` : "", element("span", { class: "mono" }, run.layout), " ", badge(run)),
      element("p", { class: "small" }, run.words),
      run.verdict ? element("p", { class: "verdict" }, run.verdict) : null,
      notes(run), figureBoxes(run));
  }
  return element("header", { class: "head" },
    element("div", { class: "over" }, "Two runs of hocket side by side"),
    element("h1", {}, runs.map((run) => run.name).join(" and ")),
    element("div", { class: "pair two" }, runs.map((run, index) => element("div", {},
      element("div", { class: "words" }),
      runName(run, index),
      element("p", {}, run.model ? `${run.model}, ` : "", element("span", { class: "mono" }, run.layout), " ", badge(run)),
      element("p", { class: "small" }, run.words),
      run.verdict ? element("p", { class: "verdict" }, run.verdict) : null,
      notes(run), figureBoxes(run)))));
}

const notes = (run) => run.notes.length ? element("ul", { class: "notes" }, run.notes.map((note) => element("li", {}, note))) : null;

function figureBoxes(run) {
  return element("div", { class: "figures" }, run.figures.map((figure) => {
    const unit = UNITS[figure.unit];
    const measured = figure.measured, predicted = figure.predicted;
    let against = null;
    if (measured !== null && predicted !== null) against = `predicted ${unit(predicted)} (${difference(figure.unit, measured, predicted)})`;
    else if (measured === null) against = "predicted, not measured";
    return element("div", { class: "figure" },
      element("div", { class: "title" }, figure.title),
      element("div", { class: "value" }, unit(measured === null ? predicted : measured), figure.unit === "rate" ? element("span", { class: "per" }, " tokens/s") : null),
      against ? element("div", { class: "against" }, against) : null,
      element("div", { class: "what" }, figure.what));
  }));
}

function timelineSection() {
  const panels = runs.flatMap((run, index) => ["predicted", "measured"].filter((which) => run.timelines[which]).map((which) => ({
    run: index, which, timeline: run.timelines[which], colour: several ? RUN_COLOURS[index] : null,
    title: (several ? `${run.name}: ` : "") + (which === "predicted" ? "Predicted" : "Measured"),
  })));
  const lead = "Each row is one rank. The broad bar is what it computes, the thin one beneath what it sends and receives; "
    + "grey is rest. All pictures share one scale of time" + (panels.some((panel) => panel.which === "predicted") ? ", predicted above measured." : ".")
    + (!several && runs[0].recorded_step ? ` Measured is step ${runs[0].recorded_step}.` : "");
  if (!panels.length) return section("One training step, rank by rank", null, missing("No timeline was recorded, and none predicted."));
  return section("One training step, rank by rank", lead, timelineBoard(panels));
}

function partsSection() {
  const rows = [];
  runs.forEach((run) => ["predicted", "measured"].forEach((which) => {
    const found = run.parts[which];
    if (found) rows.push({ run, which, found, label: which, title: several ? `${run.name}, ${which}` : which });
  }));
  if (!rows.length) return null;
  if (several) for (const row of rows) row.label = `${row.run.name}, ${row.which}`;
  const names = Object.keys(PART_WORDS);
  const bar = (label, values, title, outline = false) => ({ label, title, outline, segments: names.map((name) => ({ name, value: values[name], colour: name })) });
  const most = Math.max(...rows.map((row) => row.found.duration));
  const content = [legend(names.map((name) => [name, name === "communication" ? "exposed communication" : name])),
    stackedBars(rows.map((row) => bar(row.label, row.found.mean, row.title, row.which === "predicted")), { most, unit: seconds })];
  runs.forEach((run, index) => {
    const { predicted, measured } = run.parts;
    if (!measured) return;
    content.push(runName(run, index));
    const columns = [{ title: "Part of the step" }, ...(predicted ? [{ title: "Predicted", number: true }] : []), { title: "Measured", number: true },
      predicted ? { title: "Difference", number: true } : { title: "Fraction of the step", number: true }];
    content.push(table(columns, names.map((name) => {
      const now = measured.mean[name];
      if (!predicted) return [PART_WORDS[name], seconds(now), share(now / measured.duration || 0)];
      const then = predicted.mean[name];
      return [PART_WORDS[name], seconds(then), seconds(now), change(now, then)];
    })));
    if (measured.ranks.length > 1) {
      content.push(element("details", {}, element("summary", {}, `Measured, rank by rank${several ? ` (${run.name})` : ""}`), element("div", { class: "bars" }),
        stackedBars(measured.ranks.map((values, rank) => bar(`rank ${rank}`, values, `rank ${rank}, measured`)), { most: measured.duration, unit: seconds })));
    }
  });
  return section("Where the time of that step goes", "Averaged over the ranks; the parts add up to the step.", ...content);
}

function memorySection() {
  if (!runs.some((run) => run.memory.measured.length || run.memory.predicted.length)) return null;
  const most = Math.max(...runs.flatMap((run) => [...run.memory.measured, ...run.memory.predicted].map((row) => row.total)));
  return section("Memory of each rank", "Peak tensor bytes of a step, by kind.", perRun((run) => {
    const { holder, kinds, measured, predicted, capacity } = run.memory;
    const segments = (row) => {
      const found = kinds.filter((kind) => row[kind]).map((kind) => ({ name: kind, value: row[kind], colour: MEMORY_COLOURS[kind] || "rest" }));
      return found.length ? found : [{ name: "total", value: row.total, colour: "rest" }];
    };
    const count = Math.max(measured.length, predicted.length);
    if (!count) return missing("Nothing was counted.");
    const rows = [];
    for (let rank = 0; rank < count; rank++) {
      if (predicted[rank]) rows.push({ label: `${holder} ${rank} predicted`, short: `${rank} predicted`, segments: segments(predicted[rank]), outline: true });
      if (measured[rank]) rows.push({ label: predicted.length ? `${holder} ${rank} measured` : `${holder} ${rank}`, short: `${rank} measured`, segments: segments(measured[rank]), apart: predicted.length > 0 });
    }
    const shown = [...measured, ...predicted];
    const present = kinds.filter((kind) => shown.some((row) => row[kind]));
    // A capacity far beyond what is used would leave the bars too short to read: it is written.
    const near = capacity && capacity < 3 * most;
    const capacityText = capacity ? `A rank may use ${bytes(capacity)}; the peak rank uses ${share(Math.max(...(measured.length ? measured : predicted).map((row) => row.total)) / capacity)} of it.` : null;
    return element("div", {}, present.length ? legend(present.map((kind) => [MEMORY_COLOURS[kind] || "rest", kind === "optimizer" ? "optimizer state" : kind])) : null,
      stackedBars(rows, { most, unit: bytes, limit: near ? capacity : null, limitWord: "may use" }),
      capacityText ? element("p", { class: "small" }, capacityText) : null);
  }));
}

function trafficSection() {
  if (!runs.some((run) => run.traffic.length)) return null;
  const exact = runs.every((run) => run.traffic.every((row) => row.predicted_bytes === row.bytes));
  const most = Math.max(...runs.flatMap((run) => run.traffic.map((row) => row.bytes)));
  return section("Communication between ranks", (exact ? "Every byte was predicted exactly. " : "") + "In the recorded step, all ranks together. Exposed is the communication time of the average rank that no computation overlapped.", perRun((run) => {
    if (!run.traffic.length) return missing("Nothing was sent.");
    const predicted = run.traffic.some((row) => row.predicted !== null);
    const links = run.traffic.some((row) => row.link);
    const columns = [{ title: "Axis" }, ...(links ? [{ title: "Link" }] : []), { title: "Messages", number: true }, { title: "Bytes", number: true },
      ...(predicted ? [{ title: "Exposed, predicted", number: true }] : []), { title: predicted ? "Exposed, measured" : "Exposed", number: true }];
    return element("div", {},
      stackedBars(run.traffic.map((row) => ({ label: row.axis, title: `${whole(row.count)} calls: ${row.names.join(", ")}`, segments: [{ name: row.axis, value: row.bytes, colour: AXIS_COLOURS[row.axis] || "rest" }] })), { most, unit: bytes }),
      table(columns, run.traffic.map((row) => [row.what ? `${row.axis}, ${row.what}` : row.axis, ...(links ? [row.link || "unknown"] : []), whole(row.count), sent(row),
        ...(predicted ? [row.predicted === null ? "" : seconds(row.predicted)] : []), row.measured === null ? "" : seconds(row.measured)])));
  }));
}

// Bytes, and what was predicted where that is not the same.
function sent(row) {
  if (row.predicted_bytes === null || row.predicted_bytes === row.bytes) return bytes(row.bytes);
  return `${bytes(row.bytes)} (predicted ${bytes(row.predicted_bytes)})`;
}

function curvesSection() {
  if (!runs.some((run) => run.curves.loss.length)) return null;
  const line = (key) => runs.map((run, index) => ({ name: run.name, colour: RUN_COLOURS[index], points: run.curves[key] }));
  const loss = several ? line("loss") : [
    { name: "training", colour: "one", points: runs[0].curves.loss },
    { name: "held out", colour: "two", points: runs[0].curves.held_out, dots: true },
  ];
  const charts = [curves("Loss", "nats per token", loss, UNITS.loss)];
  if (runs.some((run) => run.curves.tokens_per_second.length)) charts.push(curves("Throughput", "tokens a second", line("tokens_per_second"), whole, { zero: true }));
  if (runs.some((run) => run.curves.mfu.length)) charts.push(curves("MFU", "fraction of the devices' peak that the model's arithmetic uses", line("mfu"), share, { zero: true }));
  const without = charts.length < 3 ? missing("MFU, the fraction of the devices' peak, is not drawn: no peak rate was known in this run, as always on CPU.") : null;
  return section("Over the steps", null, element("div", { class: "curves" }, charts), without);
}

function meshSection() {
  if (!runs.some((run) => run.mesh)) return null;
  return section("Layout", "The layout as a mesh. Lines join ranks that communicate over an axis; select an axis to highlight its lines. Below: the links between the machine's devices.",
    perRun((run) => element("div", {}, run.mesh ? meshPicture(run.mesh, run.traffic, run.machine) : missing("The layout is unknown."), linksTable(run.machine))));
}

function alternativesSection() {
  if (!runs.some((run) => run.alternatives.length)) return null;
  return section("Layouts considered", "The planner's own ranking before the run; every number here is a prediction.", perRun((run) => {
    const rows = run.alternatives;
    if (!rows.length) return missing("No alternatives were recorded.");
    const mark = (row) => [element("span", { class: "mono" }, row.layout), row.chosen ? element("span", { class: "mark" }, "this run") : null, row.fits === false ? element("span", { class: "mark" }, "does not fit") : null].filter(Boolean);
    const remarks = rows.some((row) => row.reason);
    return table([{ title: "Layout" }, { title: "Step", number: true }, { title: "Peak rank", number: true }, { title: "Bubble", number: true }, ...(remarks ? [{ title: "Remark" }] : [])],
      rows.map((row) => [element("span", {}, mark(row)), row.step_seconds === null ? "" : seconds(row.step_seconds), row.memory === null ? "" : bytes(row.memory),
        row.bubble === null ? "" : share(row.bubble), ...(remarks ? [row.reason] : [])]), (index) => rows[index].chosen);
  }));
}

function factsSection() {
  return element("section", {}, element("details", {}, element("summary", {}, "What was run, in detail"), perRun((run) => element("dl", {},
    run.facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", { class: "mono" }, value)])))));
}

document.body.append(tip);
main.append(...[head(), timelineSection(), partsSection(), memorySection(), trafficSection(), curvesSection(), meshSection(), alternativesSection(), factsSection(),
  element("footer", {}, `Made by hocket ${version} on ${made}. This file is complete in itself: it loads nothing and sends nothing.`)].filter(Boolean));
