"use strict";
// Draws window.DOCUMENT. Where window.FORM is given, asks the server that sent this page for other plans.
(() => {
  const SEA = "#0b6e8f", GREY = "#a9b7c3", GOOD = "#1b8a5a", BAD = "#b3462c", SAND = "#d9a441", PALE = "#9fd0df";
  const charts = new Map();
  const at = (id) => document.getElementById(id);
  const number = (value, digits = 3) => value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toLocaleString("en");
  const percent = (value) => value === null || value === undefined ? "–" : (100 * value).toFixed(1) + "%";
  const axis = (text, extra = {}) => ({ title: { display: true, text }, ...extra });

  function draw(id, config) {
    charts.get(id)?.destroy();
    config.options = { responsive: true, maintainAspectRatio: false, animation: false, ...config.options };
    charts.set(id, new Chart(at(id), config));
  }

  function element(name, text, parent) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    parent?.append(made);
    return made;
  }

  function table(id, headings, rows) {
    const where = at(id);
    where.replaceChildren();
    const head = element("tr", undefined, element("thead", undefined, where));
    headings.forEach((text) => element("th", text, head));
    const body = element("tbody", undefined, where);
    rows.forEach((cells) => { const row = element("tr", undefined, body); cells.forEach((text) => element("td", text, row)); });
  }

  function scatter(id, report, field, label, target, show) {
    const point = (index) => ({ x: report.plans[index].cost, y: report.plans[index][field], index });
    const indices = report.plans.map((_, index) => index).filter((index) => report.plans[index][field] !== null);
    const front = report.front.map(point).sort((a, b) => a.x - b.x || b.y - a.y);
    const others = indices.filter((index) => !report.front.includes(index));
    draw(id, {
      type: "scatter",
      data: { datasets: [
        { label: "no other is better", data: front, borderColor: SEA, backgroundColor: SEA, pointRadius: 6, pointHitRadius: 14 },
        { label: "meets the targets", data: others.filter((i) => report.plans[i].meets).map(point), backgroundColor: PALE, pointRadius: 5, pointHitRadius: 12 },
        { label: "misses a target", data: others.filter((i) => !report.plans[i].meets).map(point), backgroundColor: GREY, pointStyle: "crossRot", borderColor: GREY, pointRadius: 5, pointHitRadius: 12 },
        { label: "target", data: target, showLine: true, borderColor: BAD, borderDash: [6, 4], pointRadius: 0 },
      ] },
      options: {
        onClick: (_, hits) => { const hit = hits.find((each) => each.datasetIndex < 3); if (hit) show(charts.get(id).data.datasets[hit.datasetIndex].data[hit.index].index); },
        scales: { x: axis(report.cost_unit, { grace: "5%" }), y: axis(label, { type: "logarithmic" }) },
        plugins: { legend: { labels: { boxWidth: 12 } }, tooltip: { filter: (item) => item.datasetIndex < 3, callbacks: { label: (item) => `${report.plans[item.raw.index].name}: ${number(item.raw.y)} ms` } } },
      },
    });
  }

  function curve(id, values, target, label) {
    const share = (index) => 100 * index / Math.max(1, values.length - 1);
    draw(id, {
      type: "line",
      data: { datasets: [
        { label, data: values.map((value, index) => ({ x: value, y: share(index) })), borderColor: SEA, pointRadius: 0, borderWidth: 2 },
        { label: "target", data: [{ x: target, y: 0 }, { x: target, y: 100 }], borderColor: BAD, borderDash: [6, 4], pointRadius: 0 },
      ] },
      options: { scales: { x: axis("ms", { type: "linear", beginAtZero: true }), y: axis("% of requests at most", { min: 0, max: 100 }) }, plugins: { legend: { labels: { boxWidth: 12 } } } },
    });
  }

  function layers(plan) {
    const { layers: rows, prefill_ms: end, prompt_tokens: tokens, last_chunk_ms: start } = plan.timeline;
    at("timeline-words").textContent = rows.length
      ? `${tokens.toLocaleString("en")} tokens, the last chunk. Pale: the layer is not computed yet; dark: its last part waits or travels. Prefill ends at ${number(end, 5)} ms, the last byte arrives at ${number(Math.max(...rows.map((row) => row.done_ms)), 5)} ms.`
      : "Colocated: nothing crosses a link.";
    draw("timeline", {
      type: "bar",
      data: { labels: rows.map((row) => row.name), datasets: [
        { label: "computed", data: rows.map((row) => [start, Math.max(start, row.last_ready_ms)]), backgroundColor: PALE },
        { label: "on its way", data: rows.map((row) => [Math.max(start, row.last_ready_ms), Math.max(start, row.done_ms)]), backgroundColor: SEA },
        { type: "line", label: "end of prefill", data: rows.map((row) => ({ x: end, y: row.name })), borderColor: BAD, borderDash: [6, 4], pointRadius: 0 },
      ] },
      options: { indexAxis: "y", grouped: false, scales: { x: axis("ms from the start of prefill", { min: start }), y: { ticks: { autoSkip: true } } }, plugins: { legend: { labels: { boxWidth: 12 } } } },
    });
  }

  function memory(plan) {
    const kv = plan.memory, gb = (value) => value / 1e9;
    const upper = `layers ${kv.depth}–${kv.num_layers - 1}`, lower = `layers 0–${kv.depth - 1}`;
    const has_upper = kv.depth < kv.num_layers;
    draw("memory", {
      type: "bar",
      data: { labels: has_upper ? [lower, upper] : [lower], datasets: [
        { label: "prompt", data: [gb(kv.lower_prompt_bytes), gb(kv.upper_prompt_bytes)].slice(0, has_upper ? 2 : 1), backgroundColor: SEA },
        { label: "answer", data: [gb(kv.lower_answer_bytes), gb(kv.upper_answer_bytes)].slice(0, has_upper ? 2 : 1), backgroundColor: SAND },
      ] },
      options: { scales: { x: { stacked: true }, y: axis("GB", { stacked: true }) }, plugins: { legend: { labels: { boxWidth: 12 } } } },
    });
  }

  function show(report, index) {
    const plan = report.plans[index];
    at("pick").value = String(index);
    at("picked").textContent = `${plan.meets ? "Meets the targets" : "Misses a target"} (${percent(plan.attainment)} of requests meet both). ${plan.gpus} GPUs, ${number(plan.cost)} ${report.cost_unit}` +
      (plan.usd_per_million === null ? "" : `, ${number(plan.usd_per_million)} USD per million output tokens`) +
      `. Fullest: ${plan.fullest}.` + (plan.not_runnable ? ` Shoal cannot run it yet: ${plan.not_runnable}.` : "");
    table("times", ["ms", "mean", "p50", "p90", "p95", "p99"], plan.times.map((row) => [row.what, row.mean_ms, row.p50_ms, row.p90_ms, row.p95_ms, row.p99_ms].map((cell) => typeof cell === "string" ? cell : number(cell))));
    curve("ttft", plan.ttft_curve_ms, report.ttft_target_ms, "TTFT");
    curve("tpot", plan.tpot_curve_ms, report.tpot_target_ms, "TPOT");
    layers(plan);
    memory(plan);
    draw("resources", {
      type: "bar",
      data: { labels: plan.resources.map((row) => row.resource), datasets: [
        { label: "mean", data: plan.resources.map((row) => row.resource === plan.fullest ? null : 100 * row.mean_share), backgroundColor: SEA, skipNull: true },
        { label: "mean of the fullest", data: plan.resources.map((row) => row.resource === plan.fullest ? 100 * row.mean_share : null), backgroundColor: BAD, skipNull: true },
        { label: "peak", data: plan.resources.map((row) => row.peak_share === null ? null : 100 * row.peak_share), backgroundColor: PALE, skipNull: true },
      ] },
      options: { indexAxis: "y", scales: { x: axis("%", { min: 0, max: 100 }) }, plugins: { legend: { labels: { boxWidth: 12 } } } },
    });
  }

  function drawReport(report) {
    at("report").hidden = false;
    at("advice").textContent = report.advice;
    at("asked").replaceChildren();
    Object.entries(report.asked).forEach(([name, value]) => { const cell = element("div", undefined, at("asked")); element("dt", name, cell); element("dd", value, cell); });
    at("pick").replaceChildren();
    report.plans.forEach((plan, index) => { element("option", `${plan.name} (${number(plan.cost)} ${report.cost_unit})${plan.meets ? "" : ", misses"}`, at("pick")).value = String(index); });
    at("pick").onchange = (event) => show(report, Number(event.target.value));
    const costs = report.plans.map((plan) => plan.cost);
    const line = (value) => [{ x: Math.min(...costs), y: value }, { x: Math.max(...costs), y: value }];
    scatter("cost-ttft", report, "ttft_ms", "TTFT ms", line(report.ttft_target_ms), (index) => show(report, index));
    scatter("cost-tpot", report, "tpot_ms", "TPOT ms", line(report.tpot_target_ms), (index) => show(report, index));
    draw("needs", {
      type: "bar",
      data: { labels: report.needs.map((need) => need.visibility), datasets: [
        { label: "for the load", data: report.needs.map((need) => need.for_load_gbit_s), backgroundColor: SEA },
        { label: "for TTFT", data: report.needs.map((need) => need.for_latency_gbit_s), backgroundColor: SAND },
      ] },
      options: { scales: { y: axis("Gb/s per interface", { beginAtZero: true }) }, plugins: { legend: { labels: { boxWidth: 12 } } } },
    });
    table("changes", ["", "TTFT ms", "TPOT ms", "targets met", "fullest"], report.changes.map((row) => [row.what, number(row.ttft_ms), number(row.tpot_ms), percent(row.slo_attainment), row.fullest]));
    at("ruled-out").replaceChildren();
    report.ruled_out.forEach((words) => element("li", words, at("ruled-out")));
    show(report, report.best);
  }

  function say(words, isError) {
    at("status").hidden = !words;
    at("status").textContent = words;
    at("status").classList.toggle("error", Boolean(isError));
  }

  function drawForm(fields) {
    const form = at("form");
    form.hidden = false;
    Object.entries(fields).forEach(([name, value]) => {
      const cell = element("div", undefined, form);
      const label = element("label", name.replaceAll("_", " "), cell);
      const input = element("input", undefined, cell);
      Object.assign(input, { name, id: `field-${name}`, value });
      label.htmlFor = input.id;
    });
    const button = element("button", "Plan", form);
    form.onsubmit = async (event) => {
      event.preventDefault();
      button.disabled = true;
      say("Simulating …");
      try {
        const reply = await fetch("/plan", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(Object.fromEntries(new FormData(form))) });
        const body = await reply.json();
        if (!reply.ok) { say(body.error, true); return; }
        say("");
        drawReport(body);
      } catch (error) {
        say(`The planner did not answer: ${error.message}`, true);
      } finally {
        button.disabled = false;
      }
    };
  }

  if (window.FORM) drawForm(window.FORM);
  if (window.DOCUMENT) drawReport(window.DOCUMENT);
})();
