// The page: what is chosen becomes the options of `halfstep plan`, which are written to the address and planned.

const $ = (id) => document.getElementById(id);
// The options of the address by their first names.
const fromAddress = () => Object.fromEntries(Array.from(new URLSearchParams(location.hash.slice(1)), ([name, text]) =>
  [facts.options.find((one) => one.names.includes(`--${name}`))?.names[0].slice(2) ?? name, text]));
const { theme: themeOfAddress, ...options } = location.hash.length > 1 ? fromAddress() : initial;
let theme = themeOfAddress;

// Colours on a dark ground; on a light one they are those of `halfstep plan --out`.
const DARK = ["#3d8fd1", "#e69f00", "#9fd8f7", "#2a9d8f", "#cc79a7", "#f0e442", "#ec7a45", "#a8a8a8", "#ffffff"];
// The whole parameters of ZeroRedundancyOptimizer are assigned GPU by GPU.
const MOST_ASSIGNED = 65536n;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// ------------------------------------------------------------------------------------------------------- the form

const FIELDS = [
  ["Model", ["model", "params", "layers", "hidden", "heads", "vocab"],
    ["ffn", "kv-heads", "norm", "gated", "no-biases", "no-final-norm", "no-positions", "tied", "no-dropout", "flash"]],
  ["GPUs", ["gpus", "card", "strategy", "shard", "offload"],
    ["tensor-parallel", "sequence-parallel", "compress", "bucket-view", "reserve", "rank"]],
  ["Layout", ["optimizer", "precision", "moments", "lora"], ["gradients", "accumulator", "master", "amsgrad"]],
  ["Step", ["batch", "seq", "checkpointing"], ["accumulate", "step-in-backward", "step-ms"]],
];
const LABELS = {
  model: "Model", params: "Parameters", layers: "Layers", hidden: "Width", heads: "Heads", vocab: "Vocabulary",
  lora: "LoRA rank", ffn: "Width of the MLP", "kv-heads": "Heads of keys", norm: "Norm", gated: "Gated MLP",
  "no-biases": "No biases", "no-final-norm": "No final norm", "no-positions": "No learned positions", tied: "Tied head",
  "no-dropout": "No dropout", flash: "Flash attention", gpus: "GPUs", card: "Card", strategy: "Strategy",
  shard: "GPUs of a group", offload: "Offload to host", "tensor-parallel": "Tensor parallel",
  "sequence-parallel": "Sequence parallel", compress: "Format sent", "bucket-view": "Gradients are bucket views",
  reserve: "Reserve", rank: "Rank planned", precision: "Precision", optimizer: "Optimizer", moments: "Moments",
  gradients: "Gradients", accumulator: "Accumulator", master: "Master", amsgrad: "AMSGrad", batch: "Batch per GPU",
  seq: "Sequence", checkpointing: "Checkpointing", accumulate: "Micro-batches",
  "step-in-backward": "Step in backward (bytes)", "step-ms": "Measured step (ms)",
};
const WIDE = ["model", "strategy", "optimizer"];
const OWN = "own shape";
const NUMBER = "number of parameters";
const SHAPE_ONLY = ["layers", "hidden", "heads", "vocab", ...FIELDS[0][2]];
const KNOWN = { gated: ["gated", true], "no-biases": ["biases", false], "no-final-norm": ["final_norm", false],
  "no-positions": ["positions", false], tied: ["tied", true], "no-dropout": ["dropout", false], flash: ["flash", true] };

const optionOf = (name) => facts.options.find((one) => one.names.includes(`--${name}`));
const preset = () => facts.models[options.model?.toLowerCase()];
const kindOfModel = () => ("model" in options ? options.model : "params" in options ? NUMBER : OWN);
const choices = {
  model: () => [...Object.keys(facts.models), OWN, NUMBER].map((name) => [name, name]),
  norm: () => [["", "default"], ...facts.norms.map((name) => [name, name])],
  card: () => [["", "none"], ...facts.cards.map((one) => [one.name, `${one.name}, ${one.memory / gib} GiB`])],
  strategy: () => [["", "default"], ...facts.strategies.map((how) => [how.name, how.text.startsWith(how.name) ? how.text : `${how.name}: ${how.text}`])],
  precision: () => facts.precisions.map((name) => [name, name]),
  moments: () => [["", "default"], ...momentsAllowed().map((name) => [name, name])],
  master: () => [["", "default"], ...(rowChosen()?.master_allowed ?? []).map((name) => [name, name])],
  gradients: () => formatsOfGradients("default"),
  accumulator: () => formatsOfGradients("none"),
  compress: () => formatsOfGradients("as gradients"),
  checkpointing: () => facts.checkpointing.map((name) => [name, name]),
};
const formatsOfGradients = (none) => [["", none], ...facts.gradients.map((name) => [name, name])];
const chosen = (name) => options[name] || optionOf(name).default;
const rowChosen = () => layouts.find((row) => row.optimizer === chosen("optimizer") && row.precision === chosen("precision"));

function momentsAllowed() {
  const allowed = rowChosen()?.moments_allowed ?? [];
  if (chosen("optimizer").startsWith("halfstep")) return allowed;
  return [...allowed, ...allowed.flatMap((a) => allowed.filter((b) => b !== a).map((b) => `${a},${b}`))];
}

function optimizers() {
  const has = layouts.filter((row) => row.precision === chosen("precision"));
  const others = facts.optimizers.filter((name) => !has.some((row) => row.optimizer === name));
  const list = (label, entries) => element("optgroup", { label }, ...entries.map(([name, text]) => new Option(text, name)));
  const bytes = (row) => general(nearestDouble(bytesPerParameter(row, false).n, bytesPerParameter(row, false).d));
  return [
    list("bytes per parameter", has.map((row) => [row.optimizer, `${row.optimizer}: ${bytes(row)} B`])),
    list(`not in ${chosen("precision")}`, others.map((name) => [name, name])),
  ];
}

function control(name) {
  const option = optionOf(name);
  const attributes = { id: `o-${name}`, title: option.help };
  if (option.kind === "flag") {
    const box = element("input", { ...attributes, type: "checkbox" });
    box.addEventListener("change", () => set({ [name]: box.checked ? "" : null }));
    return element("label", { class: "check" }, box, LABELS[name]);
  }
  const made = name in choices || name === "optimizer" ? element("select", attributes) : element("input", { ...attributes, autocomplete: "off", spellcheck: "false" });
  made.addEventListener("input", () => changed(name, made.value.trim()));
  return element("label", { class: WIDE.includes(name) ? "wide" : null }, `${LABELS[name]} `, made);
}

function changed(name, value) {
  const changes = { [name]: value === "" || value === optionOf(name).default ? null : value };
  if (name === "model") Object.assign(changes, ofModel(value));
  if (name === "strategy") {
    const ranks = (count(chosen("gpus")) ?? 2n) / (count(chosen("tensor-parallel")) ?? 1n);
    changes.shard = value === "hsdp" ? (ranks % 2n ? ranks : ranks / 2n).toString() : null;
  }
  if (name === "optimizer" || name === "precision") [changes.moments, changes.master] = [null, null];
  if (name === "precision") {
    const has = layouts.filter((row) => row.precision === value);
    if (!has.some((row) => row.optimizer === chosen("optimizer"))) changes.optimizer = has[0].optimizer;
    if (changes.optimizer === optionOf("optimizer").default) changes.optimizer = null;
  }
  set(changes);
}

// The options of another kind of model; an own shape begins with that of the preset.
function ofModel(value) {
  const none = Object.fromEntries(["params", ...SHAPE_ONLY].map((name) => [name, null]));
  if (value in facts.models) {
    const { positions, seq } = facts.models[value];
    const tooLong = positions && (count(options.seq ?? "") ?? 0n) > seq;
    return { ...none, flash: options.flash ?? null, model: value, ...(tooLong ? { seq: null } : {}) };
  }
  let before = preset() ?? null;
  try {
    before = modelOf(parse(options)) ?? before;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
  }
  before ??= facts.models[Object.keys(facts.models)[0]];
  if (value === NUMBER) {
    return { ...none, model: null, checkpointing: null, lora: null, params: parametersOf(unitsOf(before)).toString() };
  }
  const { layers, hidden, heads, vocab, seq, ffn, kv_heads: keys } = before;
  const flags = Object.entries(KNOWN).filter(([, [field, wanted]]) => before[field] === wanted).map(([name]) => [name, ""]);
  return {
    ...none, model: null, ...Object.fromEntries(flags), norm: before.norm === facts.model_defaults.norm ? null : before.norm,
    ...Object.fromEntries(Object.entries({ layers, hidden, heads, vocab, ffn, "kv-heads": keys }).map(([name, size]) => [name, size?.toString() ?? null])),
    seq: options.seq ?? seq.toString(),
  };
}

function makeForm() {
  $("form").replaceChildren(...FIELDS.map(([title, first, more]) => element("fieldset", {}, element("legend", {}, title),
    element("div", { class: "fields" }, ...first.map(control)),
    element("details", { id: `more-${title}`, open: more.some((name) => name in options && name !== "flash") ? "" : null },
      element("summary", {}, "More"), element("div", { class: "fields" }, ...more.map(control))))));
}

function showForm() {
  const kind = kindOfModel();
  for (const [, first, more] of FIELDS) {
    for (const name of [...first, ...more]) {
      const made = $(`o-${name}`);
      const flag = optionOf(name).kind === "flag";
      if (flag) {
        const fixed = name in KNOWN && preset()?.[KNOWN[name][0]] === KNOWN[name][1];
        [made.checked, made.disabled] = [name in options || fixed, fixed];
      } else if (document.activeElement !== made || made.tagName === "SELECT") {
        const value = name === "model" ? (preset() ? options.model.toLowerCase() : kind) : name in options ? options[name] || optionOf(name).const : (optionOf(name).default ?? "");
        if (made.tagName === "SELECT") {
          made.replaceChildren(...(name === "optimizer" ? optimizers() : choices[name]().map(([each, text]) => new Option(text, each))));
          if (![...made.options].some((one) => one.value === value)) made.append(new Option(value, value));
        }
        made.value = value;
      }
      const known = preset()?.[name.replaceAll("-", "_")];
      if (made.tagName === "INPUT") made.placeholder = known?.toString() ?? (name === "batch" && kind !== NUMBER ? "1" : "");
    }
  }
  const visible = (name, shown) => { $(`o-${name}`).closest("label").hidden = !shown && !(name in options); };
  visible("params", kind === NUMBER);
  for (const name of SHAPE_ONLY) visible(name, kind !== NUMBER);
  for (const name of ["lora", "checkpointing"]) visible(name, kind !== NUMBER);
  for (const name of ["layers", "hidden", "heads", "vocab"]) visible(name, kind === OWN);
  $("more-Model").hidden = kind === NUMBER;
  visible("shard", chosen("strategy") === "hsdp");
  visible("master", choices.master().length > 1);
  visible("moments", choices.moments().length > 1);
}

// ------------------------------------------------------------------------------------------------------ the results

const many = (name) => (options[name] ?? "").split(",").length > 1;
// The options of the plan that is shown; of several GPUs or strategies, the first.
function single() {
  const { compare, ...rest } = options;
  for (const name of ["gpus", "strategy"]) if (many(name)) rest[name] = rest[name].split(",")[0];
  return rest;
}

function checkAssigned(given) {
  const most = given.gpus ? (kinds.counts(given.gpus) ?? [1n]).reduce((a, b) => (b > a ? b : a)) : 1n;
  return most <= MOST_ASSIGNED;
}

const sized = (value) => (value ? size(value) : "0");
const eachText = (value) => (value === null ? "" : general(value, 4));
const cell = (text) => element("td", { class: "number" }, text);
const wordCell = (text) => element("td", { class: "words" }, text);
const colour = (kind) => {
  const at = facts.memory_kinds.findIndex((one) => one.kind === kind);
  return `--light: ${facts.memory_kinds[at].colour}; --dark: ${DARK[at]}`;
};

function fillBar(bar, made, whole) {
  const share = (bytes) => `${(100 * nearestDouble(bytes, whole)).toFixed(3)}%`;
  const marks = made.card === null ? [] : [["", made.card.memory], ["usable", made.card.usable]].filter(([, bytes]) => bytes <= whole);
  bar.replaceChildren(
    ...stack(made).map(([kind, bytes]) => element("i", { style: `${colour(kind)}; width: ${share(bytes)}` })),
    ...marks.map(([name, bytes]) => element("b", { class: name, style: `left: ${share(bytes)}` })),
  );
}

// The card, unless it is more than four times as large as what is shown; then the largest peak.
function scaleOf(plans) {
  const peak = plans.map((made) => made.totals.peak).reduce((a, b) => (b > a ? b : a), 1n);
  const memory = plans[0].card?.memory ?? 0n;
  return memory < 4n * peak && memory > peak ? memory : peak;
}

const inWords = (many) => {
  const [unit, word] = many >= 10n ** 9n ? [10n ** 9n, " billion"] : many >= 10n ** 6n ? [10n ** 6n, " million"] : [1n, ""];
  return `${fixed(nearestDouble(many, unit), word ? 1 : 0)}${word} parameters`;
};

function largest(what) {
  try {
    const found = contentOf({ ...single(), fit: what }).fit.plan;
    if (found === null) return ["none", { params: "no model", layers: "not even one layer", batch: "not even one sequence" }[what]];
    if (what === "params") return [commas(found.parameters), "parameters, without activations"];
    return what === "batch" ? [commas(found.settings.batch), "sequences per GPU"] : [`${commas(found.settings.model.layers)} layers`, inWords(found.parameters)];
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return ["no limit", "everything is on the host"];
  }
}

function figures(made) {
  const { totals, card: gpu, settings } = made;
  const found = [["Peak per GPU", size(totals.peak), `${size(totals.state)} of it always`]];
  if (totals.host) found.push(["On the host", size(totals.host), "for this GPU"]);
  found.push(["Sent by each GPU", sized(made.bytes_sent), "in a step"]);
  if (gpu !== null && !settings.offload) {
    const milliseconds = (1e3 * Number(made.step_traffic)) / gpu.bandwidth;
    found.push(["Optimizer's step", `${digits(milliseconds)} ms`, `${size(made.step_traffic)} at ${general(gpu.bandwidth / 1e12)} TB/s`]);
  } else found.push(["Optimizer's step", size(made.step_traffic), settings.offload ? "moved on the host" : "moved"]);
  if (gpu !== null && made.work !== null) {
    found.push(["Matrix products", `${digits(1e3 * (Number(made.work.hardware) / gpu.flops))} ms`, `at the peak of ${general(gpu.flops / 1e12)} TFLOP/s`]);
  }
  if (gpu !== null && settings.model !== null) {
    found.push(["Largest batch", ...largest("batch")], ["Largest model of this width", ...largest("layers")]);
  } else if (gpu !== null) found.push(["Largest model", ...largest("params")]);
  if (made.mfu !== null) found.push(["MFU", fixed(made.mfu, 3), `HFU ${fixed(made.hfu, 3)}`]);
  return found;
}

function showPlan(content) {
  const [made] = content.plans;
  const whole = scaleOf([made]);
  $("verdict").textContent = saidOfCard(made)[0] ?? `${size(made.totals.peak)} per GPU at the peak. Choose a card to see whether it fits.`;
  $("verdict").dataset.fits = made.card === null ? "" : made.card.fits ? "yes" : "no";
  $("figures").replaceChildren(...figures(made).map(([name, value, note]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, " ", element("span", {}, note)))));
  fillBar($("bar"), made, whole);
  const bars = stack(made);
  $("scale").textContent = made.card !== null && whole === made.card.memory
    ? `The bar is the ${size(whole)} of the ${made.card.name}; the dashed line is what remains after the reserve.`
    : !made.totals.peak ? "Everything is on the host." : `The bar is ${size(whole)}, the peak.${made.card === null ? "" : ` The ${made.card.name} has ${size(made.card.memory)}.`}`;
  const share = (bytes) => (bytes ? `${fixed(100 * nearestDouble(bytes, made.totals.peak), 1)} %` : "");
  $("kinds").replaceChildren(...[...bars, ["all", made.totals.peak]].map(([kind, bytes]) =>
    element("tr", {}, element("th", { scope: "row" }, ...(kind === "all" ? [] : [element("span", { class: "key", style: colour(kind) })]), kind),
      cell(sized(bytes)), cell(share(bytes)))));
  const when = { always: "always", backward: "forward, backward", step: "step" };
  $("parts").replaceChildren(...made.parts.map((one) => element("tr", {}, element("th", { scope: "row" }, one.name),
    cell(`${one.exact ? "" : "≈ "}${sized(one.bytes)}`), cell(eachText(one.per_parameter)), cell(one.divisor > 1n ? commas(one.divisor) : ""),
    wordCell(one.place === "gpu" ? when[one.phase] : "on the host"), wordCell(one.note))));
  $("silent").hidden = made.communication.length > 0;
  $("sent-scroll").hidden = made.communication.length === 0;
  $("sent").replaceChildren(...made.communication.map((one) => element("tr", {}, element("th", { scope: "row" }, one.what),
    cell(sized(one.bytes)), wordCell(one.name), cell(one.ranks > 1n ? commas(one.ranks) : ""), cell(commas(one.times)), cell(eachText(one.per_parameter)))));
  $("said").replaceChildren(...sentences(content, shapeOverParams(single())).map((text) => element("li", {}, text)));
}

// The options of the comparison: of one strategy, all others too.
function besideOptions() {
  const { fit: _fit, "step-ms": _time, rank: _rank, ...rest } = options;
  const compare = options.compare ?? "strategies";
  if (compare === "strategies" && !many("strategy")) delete rest.strategy;
  if (compare === "strategies" && !checkAssigned(rest)) {
    const row = layout(chosen("optimizer"), chosen("precision"), { moments: options.moments || null });
    const listed = facts.strategies.filter((how) => !["single", "zero1-torch"].includes(how.name) && (keepsRows(how) || !needsRows(row)));
    if (!many("strategy")) rest.strategy = listed.map((how) => how.name).join(",");
  }
  if (compare === "layouts") {
    for (const name of ["gpus", "strategy"]) if (many(name)) rest[name] = rest[name].split(",")[0];
    for (const name of ["moments", "master", "gradients", "step-in-backward"]) delete rest[name];
  }
  return { ...rest, compare };
}

function showBeside() {
  const given = besideOptions();
  const { plans } = contentOf(given);
  const whole = scaleOf(plans);
  const carded = plans[0].card !== null;
  const hosted = plans.some((made) => made.totals.host);
  const head = [given.compare === "layouts" ? "Layout" : "Strategy", "Peak", ...(carded ? ["Fits"] : []), "Picture", "Always", "Sent in a step", ...(hosted ? ["Host"] : [])];
  $("beside-head").replaceChildren(element("tr", {}, ...head.map((text, i) => element("th", { scope: "col", class: text === "Picture" ? "picture" : i && text !== "Fits" ? "number" : null }, text))));
  $("beside").replaceChildren(...plans.map((made, i) => {
    const [bar, small] = [0, 1].map(() => element("div", { class: "bar", "aria-hidden": "true" })); // beside, and below on a phone
    for (const one of [bar, small]) fillBar(one, made, whole);
    const { settings, totals } = made;
    const now = given.compare === "layouts" ? chosen("optimizer") === settings.optimizer && chosen("precision") === settings.precision : options.strategy === settings.strategy && options.gpus === settings.gpus.toString();
    const choose = element("button", { type: "button", onclick: () => chooseBeside(given.compare, settings, i) }, made.label);
    return element("tr", { "aria-current": now ? "true" : null }, element("th", { scope: "row" }, choose, small), cell(size(totals.peak)),
      ...(carded ? [element("td", {}, made.card.fits ? "yes" : "no")] : []), element("td", { class: "picture" }, bar),
      cell(size(totals.state)), cell(sized(made.bytes_sent)), ...(hosted ? [cell(sized(totals.host))] : []));
  }));
  const left = given.compare === "strategies" && !checkAssigned(given) ? " zero1-torch is left out with more than 65,536 GPUs; halfstep plan has it." : "";
  $("beside-note").textContent = `${whole === plans[0].card?.memory ? `Bars are of the ${size(whole)} of the ${plans[0].card.name}` : `Bars are of ${size(whole)}, the largest peak`}. Choose a row to plan it.${left}`;
}

function chooseBeside(compare, settings, place) {
  if (compare === "layouts") {
    const shown = (name) => (settings[name] === optionOf(name).default ? null : settings[name]);
    set({ optimizer: shown("optimizer"), precision: shown("precision"), moments: null, master: null, gradients: null });
  } else set({ strategy: settings.strategy, gpus: settings.gpus.toString(), shard: settings.shard?.toString() ?? null, rank: null });
  $("beside").rows[place]?.querySelector("button").focus(); // the row was made again
}

// What `show` refuses with its message, or null.
function attempt(show) {
  try {
    show();
    return null;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return error.message;
  }
}

function showAll() {
  history.replaceState(null, "", `#${new URLSearchParams({ ...options, ...(theme ? { theme } : {}) })}`);
  showForm();
  $("compare").value = options.compare ?? "strategies";
  $("command").textContent = commandLine(options);
  const refused = attempt(() => {
    if (options.strategy === "zero1-torch" && !checkAssigned(options)) throw new Refused("The page plans zero1-torch on up to 65,536 GPUs; halfstep plan has no such limit.");
    showPlan(contentOf(single()));
  });
  $("error").textContent = refused ?? "";
  for (const id of ["results", "details", "verdict"]) $(id).hidden = refused !== null;
  const apart = attempt(showBeside);
  $("beside-scroll").hidden = apart !== null;
  if (apart !== null) $("beside-note").textContent = apart === refused ? "" : apart;
  showJson();
}

function showJson() {
  if (!$("data").open) return;
  attempt(() => { $("json").textContent = json(contentOf(options)); });
}

function set(changes) {
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined) delete options[name];
    else options[name] = value;
  }
  showAll();
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    $("copied").textContent = `${what} copied.`;
  } catch {
    $("copied").textContent = `The browser does not allow copying; select the text: ${text}`;
  }
}

function showTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "Light" : "Dark";
}

makeForm();
$("compare").replaceChildren(...facts.comparisons.map((name) => new Option(name, name)));
$("compare").addEventListener("input", () => set({ compare: $("compare").value === "strategies" ? null : $("compare").value }));
$("copy").addEventListener("click", () => copy(commandLine(options), "Command"));
$("link").addEventListener("click", () => copy(location.href, "Link"));
$("data").addEventListener("toggle", showJson);
addEventListener("hashchange", () => {
  const { theme: _theme, ...given } = fromAddress();
  for (const name of Object.keys(options)) delete options[name];
  set(given);
});
showTheme(theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
$("theme").addEventListener("click", () => {
  theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  showTheme(theme === "dark");
  showAll();
});
showAll();
