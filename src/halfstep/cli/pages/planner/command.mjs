// `halfstep plan` itself, as src/halfstep/cli/plan.py, and what it says of a plan, as plan_tables.py. Options are an
// object of texts by the names of the command line; "" is an option without a value.

// ---------------------------------------------------------------------------------------------------- cli/numbers.py

const suffixes = { k: 3n, m: 6n, b: 9n, g: 9n, t: 12n };
const units = { mib: 1n << 20n, gib: 1n << 30n, mb: 10n ** 6n, gb: 10n ** 9n };

function decimal(whole, part = "", power = 0n) {
  const exponent = power - BigInt(part.length);
  return exponent >= 0n ? fraction(BigInt(whole + part) * 10n ** exponent) : fraction(BigInt(whole + part), 10n ** -exponent);
}

function count(text) {
  const found = text.trim().toLowerCase().match(/^([0-9][0-9_]*)(?:\.([0-9]+))?(?:e\+?([0-9]+))?([kmbgt]?)$/);
  if (!found || found[3]?.length > 4) return null;
  const value = decimal(found[1].replaceAll("_", ""), found[2], BigInt(found[3] ?? 0) + (suffixes[found[4]] ?? 0n));
  return value.d === 1n && value.n >= 1n ? value.n : null;
}

const kinds = {
  text: (text) => text,
  count: (text) => {
    const value = count(text);
    return value === null || Number(value) === Infinity ? null : value;
  },
  counts: (text) => {
    const values = text.split(",").map(count);
    return values.includes(null) ? null : [...new Set(values)];
  },
  index: (text) => {
    const plain = text.trim();
    if (!/^[+-]?\d+(_\d+)*$/.test(plain)) return null;
    const value = BigInt(plain.replaceAll("_", "").replace("+", ""));
    return value >= 0n && value < 1n << 63n ? value : null;
  },
  above_zero: (text) => {
    const plain = text.trim();
    const value = /^[+-]?(\d+(_\d+)*\.?(\d+(_\d+)*)?|\.\d+(_\d+)*)(e[+-]?\d+(_\d+)*)?$/i.test(plain) ? Number(plain.replaceAll("_", "")) : 0;
    return value > 0 && value < Infinity ? value : null;
  },
  share_or_bytes: (text) => {
    const found = text.trim().toLowerCase().match(/^([0-9]+)(?:\.([0-9]+))?\s*(%|[mg]i?b)$/);
    if (!found) return null;
    const value = decimal(found[1], found[2]);
    if (found[3] !== "%") return fraction((value.n * units[found[3]]) / value.d);
    if (value.n < 100n * value.d) return fraction(value.n, 100n * value.d);
    throw new Refused(`expected a share below 100%, but got ${repr(text)}`);
  },
};

// Options as values by their names in Python.
export function parse(options) {
  const given = Object.fromEntries(facts.options.map((one) => [one.dest, absent(one)]));
  for (const [name, text] of Object.entries(options)) {
    const option = facts.options.find((one) => one.names.includes(`--${name}`));
    if (!option) throw new Refused(`unknown option --${name}`);
    const wrong = `argument ${option.names.join("/")}`;
    if (option.kind === "flag") {
      if (text !== "") throw new Refused(`${wrong}: takes no value, and was given ${repr(text)}`);
      given[option.dest] = true;
    } else {
      if (text === "" && option.const === null) throw new Refused(`${wrong}: expected one argument`);
      given[option.dest] = valueOf(option, text === "" ? option.const : text);
    }
  }
  return given;
}

function absent(option) {
  if (option.default === null) return option.kind === "flag" ? false : null;
  return valueOf(option, option.default);
}

function valueOf(option, text) {
  const wrong = (message) => new Refused(`argument ${option.names.join("/")}: ${message}`);
  let value;
  try {
    value = kinds[option.kind](text);
  } catch (error) {
    throw wrong(error.message);
  }
  if (value === null) throw wrong(option.expected + repr(option.trims ? text.trim() : text));
  return value;
}

// ------------------------------------------------------------------------------------------------------- cli/plan.py

const dashed = (name) => `--${name.replaceAll("_", "-")}`;

function modelOf(given) {
  const named = facts.shape.filter((name) => given[name] !== null);
  const changes = {
    ffn: given.ffn,
    kv_heads: given.kv_heads,
    norm: given.norm,
    gated: given.gated || null,
    biases: given.no_biases ? false : null,
    final_norm: given.no_final_norm ? false : null,
    positions: given.no_positions ? false : null,
    tied: given.tied || null,
    dropout: given.no_dropout ? false : null,
    flash: given.flash || null,
  };
  for (const name of Object.keys(changes)) if (changes[name] === null) delete changes[name];
  const from = (names) => Object.fromEntries(names.map((name) => [name, given[name]]));
  if (given.model !== null) {
    oneOf("--model", given.model.toLowerCase(), Object.keys(facts.models));
    return transformer({ ...facts.models[given.model.toLowerCase()], ...from(named.filter((name) => name !== "seq")), ...changes });
  }
  if (!named.some((name) => name !== "seq")) {
    if (Object.keys(changes).length) {
      throw new Refused(`${Object.keys(changes).map(dashed).join(", ")} without a shape; give --model, or ${facts.shape.map(dashed).join(", ")}`);
    }
    return null;
  }
  const missing = facts.shape.filter((name) => !named.includes(name)).map(dashed);
  if (missing.length) throw new Refused(`${missing.join(", ")} missing; a shape is ${facts.shape.map(dashed).join(", ")}`);
  return transformer({ ...facts.model_defaults, ...from(facts.shape), ...changes });
}

function argumentsOf(given) {
  const model = modelOf(given);
  if (model === null && given.params === null) {
    throw new Refused("expected a model, but got none: pass --params 7e9, --model llama-3-8b, or the shape of a transformer");
  }
  if (model !== null && given.params !== null) {
    const parameters = parametersOf(unitsOf(model));
    if (nearestDouble(absolute(parameters - given.params), parameters) > 0.1) {
      throw new Refused(`--params is ${commas(given.params)}, but the shape has ${commas(parameters)}; leave one of them out`);
    }
  }
  const batch = given.batch ?? (model === null ? null : 1n);
  return { ...given, params: model === null ? given.params : null, model, gpus: given.gpus[0], batch };
}

// Plans of all layouts of one precision, or of strategies: [label, plan].
export function compared(what, given, gpus, names) {
  oneOf("compare", what, facts.comparisons);
  if (what === "strategies") {
    const fewest = gpus.reduce(least);
    if (fewest / given.tensor_parallel < 2n) {
      throw new Refused(`gpus is ${fewest}; strategies differ only on 2 or more data-parallel GPUs`);
    }
    const row = layout(given.optimizer, given.precision, { moments: given.moments });
    const others = facts.strategies.map((how) => how.name).filter((name) => name !== "single");
    const chosen = names.length ? names : others.filter((name) => keepsRows(strategies[name]) || !needsRows(row));
    for (const name of chosen) oneOf("strategy", name, others);
    return chosen.flatMap((name) => gpus.map((many) => ofStrategy(given, name, many, gpus.length > 1)));
  }
  for (const name of ["moments", "master", "gradients", "step_in_backward"]) {
    if (given[name] !== null) throw new Refused(`${name} is ${repr(given[name])} while layouts are compared; leave it out`);
  }
  const { precision } = given;
  oneOf("precision", precision, facts.precisions);
  const compute = layout("torch", precision).compute.name;
  const same = [precision, compute === "fp32" ? "fp32" : `amp-${compute}`];
  oneOf("strategy", given.strategy ?? "single", Object.keys(strategies));
  const cutsRows = !keepsRows(strategies[given.strategy ?? "single"]);
  const order = ["fp32", `amp-${compute}`, compute];
  return layouts
    .filter((row) => row.precision === precision || (row.optimizer === "torch" && ["fp32", ...same].includes(row.precision)))
    .filter((row) => (row.amsgrad || !given.amsgrad) && !(needsRows(row) && cutsRows))
    .filter((row) => layoutName(row) !== "halfstep, bf16") // the same as halfstep-split
    .sort((a, b) => order.indexOf(a.precision) - order.indexOf(b.precision))
    .map((row) => [
      row.precision === precision && precision !== "fp32" ? row.optimizer : layoutName(row),
      plan({ ...given, optimizer: row.optimizer, precision: row.precision }),
    ]);
}

function ofStrategy(given, name, gpus, counted) {
  const ranks = gpus / given.tensor_parallel;
  const shard = name === "hsdp" ? (given.shard ?? (ranks % 2n ? ranks : ranks / 2n)) : null;
  const able = strategies[name].offloads && (!facts.mirrored.includes(name) || given.optimizer.startsWith("halfstep"));
  const released = facts.stepping_in_backward.includes(name) ? given.step_in_backward : null;
  const offload = given.offload && Boolean(able);
  const label = [name, ...(shard === null ? [] : [`groups of ${shard}`]), ...(counted ? [`${commas(gpus)} GPUs`] : [])];
  return [label.join(", "), plan({ ...given, strategy: name, gpus, shard, offload, rank: null, step_in_backward: released })];
}

function withCard(made, gpu, reserve, stepMs) {
  const content = { ...asDict(made), card: null, mfu: null, hfu: null };
  if (gpu !== null) {
    const left = usable(gpu, reserve) - made.totals.peak;
    content.card = { ...gpu, usable: usable(gpu, reserve), left, fits: left >= 0n };
    if (stepMs !== null) {
      content.mfu = utilisation(made.work.training, stepMs / 1e3, gpu.flops);
      content.hfu = utilisation(made.work.hardware, stepMs / 1e3, gpu.flops);
    }
  }
  return content;
}

// What `halfstep plan --json` prints for these options: json(contentOf(options)) is the same text.
export function contentOf(options) {
  const given = parse(options);
  const names = given.strategy ? given.strategy.split(",") : [];
  if (given.compare !== "strategies") {
    for (const [name, values] of [["--gpus", given.gpus], ["--strategy", names]]) {
      if (values.length > 1) {
        throw new Refused(`${name} is ${values.join(",")}; give one value, or add --compare strategies to plan each`);
      }
    }
  }
  const wanted = argumentsOf({ ...given, strategy: names.length ? names[0] : null });
  const gpu = given.card === null ? null : card(given.card);
  oneOf("--fit", given.fit, facts.fits);
  if (gpu === null) {
    for (const [name, value] of [["--fit", given.fit !== "none"], ["--step-ms", given.step_ms !== null]]) {
      if (value) throw new Refused(`${name} without a card; give --card, one of ${Object.keys(cards).join(", ")}`);
    }
  }
  if (given.step_ms !== null && wanted.model === null && (given.batch === null || given.seq === null)) {
    throw new Refused("--step-ms with --params only; give --batch and --seq too, or a shape");
  }
  let plans;
  if (given.compare === null) {
    const made = plan(wanted);
    plans = [[`${layoutName(made.layout)}, ${made.settings.strategy}`, made]];
  } else plans = compared(given.compare, wanted, given.gpus, names);
  let found = null;
  if (given.fit !== "none") {
    if (given.compare !== null) throw new Refused("--fit with --compare; give one of them");
    const best = fit(given.fit, usable(gpu, given.reserve), wanted);
    found = { what: given.fit, plan: best === null ? null : withCard(best, gpu, given.reserve, null) };
  }
  return {
    halfstep: facts.halfstep,
    compare: given.compare,
    plans: plans.map(([label, made]) => ({ label, ...withCard(made, gpu, given.reserve, given.step_ms) })),
    fit: found,
  };
}

const quoted = (text) => (/^[\w.,%+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

// The command line of these options, which come from the address, that is from whoever wrote the link: it must run
// nothing but `halfstep plan`. Unknown options are left out, and so are control characters, which would end a paste into
// a terminal. A value that begins with "-" stays the value of its option.
export function commandLine(options) {
  const known = Object.entries(options).filter(([name]) => facts.options.some((one) => one.names.includes(`--${name}`)));
  const words = known.map(([name, text]) => {
    const value = text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "");
    if (value === "") return `--${name}`;
    return value.startsWith("-") ? quoted(`--${name}=${value}`) : `--${name} ${quoted(value)}`;
  });
  return ["halfstep plan", ...words].join(" ");
}

// The number of parameters that was given in addition to a shape, or null.
export function shapeOverParams(options) {
  const given = parse(options);
  return modelOf(given) === null ? null : given.params;
}

// ------------------------------------------------------------------------------------------------ cli/plan_tables.py

const SIZES = [[40n, "TiB"], [30n, "GiB"], [20n, "MiB"], [10n, "KiB"]];
const DECIMALS = [[18, "E"], [15, "P"], [12, "T"], [9, "G"], [6, "M"], [3, "k"]];

export const digits = (value) => fixed(value, value >= 100 ? 0 : value >= 10 ? 1 : 2);

export function size(value) {
  const found = SIZES.find(([power]) => value >= 1n << power);
  return found ? `${digits(nearestDouble(value, 1n << found[0]))} ${found[1]}` : `${value} B`;
}

function inDecimals(value, unit) {
  const found = DECIMALS.find(([power]) => value >= 10n ** BigInt(power));
  return found ? `${general(nearestDouble(value, 10n ** BigInt(found[0])), 3)} ${found[1]}${unit}` : `${general(Number(value), 3)} ${unit}`;
}

function saidOfWork(made) {
  const { work, card: gpu } = made;
  const said = [];
  if (work !== null) {
    const again = work.hardware - work.training;
    const more = again ? `, and ${inDecimals(again, "FLOP")} recomputed for checkpointing.` : ".";
    said.push(`Work of a step: ${work.exact ? "" : "≈ "}${inDecimals(work.training, "FLOP")} per GPU${more}`);
  }
  const crossing = made.communication.filter((one) => one.name.startsWith("copy ")).map((one) => one.bytes);
  if (crossing.length) {
    const all = sum(crossing);
    const durations = [25, 55].map((rate) => `${digits(Number(all) / rate / 1e6)} ms at ${rate} GB/s`).join(" and ");
    said.push(`${size(all)} cross the bus: ${durations}, as over PCIe 4.0 and 5.0 with 16 lanes.`);
  }
  const moved = `The optimizer's step moves at least ${size(made.step_traffic)}`;
  if (gpu === null) return [...said, `${moved}.`];
  if (made.settings.offload) said.push(`${moved}, in the host's memory.`);
  else {
    const milliseconds = (1e3 * Number(made.step_traffic)) / gpu.bandwidth;
    said.push(`${moved}: ${digits(milliseconds)} ms at ${general(gpu.bandwidth / 1e12)} TB/s.`);
  }
  if (work !== null) {
    const peak = `At ${general(gpu.flops / 1e12)} TFLOP/s, the ${gpu.name}'s dense bf16 peak`;
    said.push(`${peak}, the work takes ${digits(1e3 * (Number(work.hardware) / gpu.flops))} ms.`);
  }
  if (made.mfu !== null) {
    said.push(`MFU ${fixed(made.mfu, 3).replaceAll(",", "")}, HFU ${fixed(made.hfu, 3).replaceAll(",", "")}; 0.5 and above is good.`);
    if (made.hfu > 1) said.push("HFU above 1 exceeds the card's peak: check the time, the batch and the card.");
  }
  return said;
}

export function saidOfCard({ card: gpu }) {
  if (gpu === null) return [];
  const verdict = gpu.fits ? `fits, ${size(gpu.left)} left` : `does not fit, ${size(-gpu.left)} too much`;
  return [`${gpu.name}: ${size(gpu.memory)}, ${size(gpu.usable)} after the reserve; ${verdict}.`];
}

export function saidOfFit(found) {
  if (found === null) return [];
  const best = found.plan;
  if (best === null) {
    return [`${{ params: "No model", layers: "Not even one layer", batch: "Not even one sequence" }[found.what]} fits.`];
  }
  const value = {
    params: () => `${commas(best.parameters)} parameters`,
    layers: () => `${best.settings.model.layers} layers (${commas(best.parameters)} parameters)`,
    batch: () => `a micro-batch of ${best.settings.batch}`,
  }[found.what]();
  const note = found.what === "params" ? ", activations not counted" : "";
  return [`The largest that fits: ${value}, at ${size(best.totals.peak)}${note}.`];
}

// What is said of the only plan of `content` below its tables.
export function sentences(content, shapeOverParams = null) {
  const [made] = content.plans;
  const capital = (text) => text[0].toUpperCase() + text.slice(1);
  const notes = made.communication.filter((one) => one.note).map((one) => `${capital(one.what)}: ${one.note}.`);
  const said = [...notes, ...saidOfWork(made), ...saidOfCard(made), ...saidOfFit(content.fit)];
  if (shapeOverParams !== null && shapeOverParams !== made.parameters) {
    said.push(`--params ${commas(shapeOverParams)} is not used: the shape has ${commas(made.parameters)}.`);
  }
  if (made.layout.note) said.push(`${made.layout.name}: ${made.layout.note}.`);
  if (made.settings.model === null) said.push("Activations and gathered units are not included: they are unknown without a shape.");
  return said;
}

// The bytes of each kind at the peak, as plan_picture.stack: [kind, bytes].
export function stack(made) {
  const phases = ["always", made.totals.backward >= made.totals.step ? "backward" : "step"];
  const counted = made.parts.filter((one) => one.place === "gpu" && phases.includes(one.phase));
  return facts.memory_kinds
    .map(({ kind, names }) => [kind, counted.filter((one) => names.includes(one.name))])
    .filter(([, parts]) => parts.length)
    .map(([kind, parts]) => [kind, sum(parts.map((one) => one.bytes))]);
}
