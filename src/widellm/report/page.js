"use strict";
// The report's numbers are in the page as JSON; this shows them for the token under the pointer or the focus.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const text = document.getElementById("tokens");
  const panel = document.getElementById("panel");
  const spans = Array.from(text.querySelectorAll(".t"));
  const { tokens, model } = data;
  const levels = 10;
  let focused = 0;
  let shown = -1;

  const percent = (value) => (100 * value).toFixed(1) + "%";
  const mean = (kind, i) => tokens[kind][i].reduce((a, b) => a + b, 0) / (model.groups[kind] * model.layers);
  const measures = {
    share: tokens.share,
  };
  const kinds = Object.keys(model.groups);
  for (const kind of kinds) measures[kind] = tokens.ids.map((_, i) => mean(kind, i));

  function bars(i) {
    const width = 300, height = 46, gap = 22, step = width / model.layers;
    let body = "";
    kinds.forEach((kind, row) => {
      const top = row * (height + gap) + 14;
      body += `<text x="0" y="${top - 4}">${kind === "ffn" ? "FFN" : "attention"}: groups kept in each layer</text>`;
      tokens[kind][i].forEach((kept, layer) => {
        const full = (height * kept) / model.groups[kind];
        const x = (layer * step).toFixed(2), w = Math.max(step - 1, 0.5).toFixed(2);
        body += `<rect class="back" x="${x}" y="${top}" width="${w}" height="${height}"/>`;
        body += `<rect class="${kind}" x="${x}" y="${(top + height - full).toFixed(2)}" width="${w}" height="${full.toFixed(2)}"/>`;
      });
    });
    const foot = kinds.length * (height + gap) + 6;
    body += `<text x="0" y="${foot}">layer 0</text>`;
    body += `<text x="${width}" y="${foot}" text-anchor="end">layer ${model.layers - 1}</text>`;
    const said = kinds.map((kind) => `${kind}: ${tokens[kind][i].join(", ")} of ${model.groups[kind]}`);
    return `<svg class="bars" viewBox="0 0 ${width} ${foot + 4}" role="img" aria-label="Groups kept in layers 0 to ` +
      `${model.layers - 1}. ${said.join(". ")}.">${body}</svg>`;
  }

  function show(i) {
    if (i === shown) return;
    if (shown >= 0) spans[shown].classList.remove("on");
    shown = i;
    spans[i].classList.add("on");
    panel.querySelector("code").textContent = spans[i].textContent.trim() || "\u2423";
    const values = {
      place: `${i + 1} of ${spans.length}`, kind: tokens.kind[i], share: percent(measures.share[i]),
    };
    for (const kind of kinds) values[kind] = percent(measures[kind][i]);
    for (const [name, value] of Object.entries(values)) panel.querySelector(`[data-f=${name}]`).textContent = value;
    panel.querySelector(".chart").innerHTML = bars(i); // numbers only: nothing of the text goes in here
  }

  function focus(i) {
    spans[focused].tabIndex = -1;
    focused = Math.min(Math.max(i, 0), spans.length - 1);
    spans[focused].tabIndex = 0;
    spans[focused].focus({ preventScroll: true });
    spans[focused].scrollIntoView({ block: "nearest" });
  }

  // the token above or below: the nearest one on the next line that differs
  function vertical(i, direction) {
    const from = spans[i].getClientRects()[0] || spans[i].getBoundingClientRect();
    let line = null, best = i, distance = Infinity;
    for (let j = i + direction; j >= 0 && j < spans.length; j += direction) {
      const box = spans[j].getClientRects()[0];
      if (!box || Math.abs(box.top - from.top) < from.height / 2) continue;
      if (line === null) line = box.top;
      if (Math.abs(box.top - line) > from.height / 2) break;
      const far = Math.abs(box.left - from.left);
      if (far < distance) { distance = far; best = j; }
    }
    return best;
  }

  const keys = {
    ArrowRight: (i) => i + 1, ArrowLeft: (i) => i - 1, Home: () => 0, End: () => spans.length - 1,
    ArrowDown: (i) => vertical(i, 1), ArrowUp: (i) => vertical(i, -1), PageDown: (i) => i + 50, PageUp: (i) => i - 50,
  };
  const place = (node) => (node.closest ? spans.indexOf(node.closest(".t")) : -1);

  text.addEventListener("keydown", (event) => {
    const step = keys[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    focus(step(focused));
  });
  text.addEventListener("focusin", (event) => { const i = place(event.target); if (i >= 0) { focused = i; show(i); } });
  text.addEventListener("mouseover", (event) => { const i = place(event.target); if (i >= 0) show(i); });
  text.addEventListener("mouseleave", () => show(focused));
  text.addEventListener("click", (event) => { const i = place(event.target); if (i >= 0) focus(i); });

  function tint(name) {
    const values = measures[name];
    const sorted = [...values].sort((a, b) => a - b);
    const low = sorted[Math.floor(0.02 * (sorted.length - 1))], high = sorted[Math.ceil(0.98 * (sorted.length - 1))];
    spans.forEach((span, i) => {
      const level = high > low ? Math.floor((levels * (values[i] - low)) / (high - low)) : levels / 2;
      span.className = `t q${Math.min(Math.max(level, 0), levels - 1)}${i === shown ? " on" : ""}`;
    });
    document.getElementById("low").textContent = percent(low);
    document.getElementById("high").textContent = percent(high);
  }
  for (const radio of document.querySelectorAll("input[name=tint]")) {
    radio.addEventListener("change", () => tint(radio.value));
  }
  document.getElementById("tint").hidden = false;
  panel.hidden = false;
  tint("share");
  show(0);
})();
