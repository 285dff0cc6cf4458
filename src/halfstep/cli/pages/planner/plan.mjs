// The rules of numerics/planning, which specifies them; the same names in the same order. Their tables are in `facts`,
// which Python writes into the page.

// ------------------------------------------------------------------------------------------------------ layouts.py

const formats = Object.fromEntries(facts.formats.map((form) => [form.name, form]));
const named = (name) => (name === null ? null : formats[name]);
const among = (form, names) => form !== null && names.includes(form.name);
const layouts = facts.layouts.map((row) => ({
  ...row,
  ...Object.fromEntries(["weights", "gradients", "master", "exp_avg", "exp_avg_sq", "compute"].map((key) => [key, named(row[key])])),
}));

function bytesOf(form, elements, row = 0n) {
  if (form.without_rows === null) return elements * form.width + (form.group ? ceilDiv(elements, form.group) * form.scale : 0n);
  if (!row) return bytesOf(formats[form.without_rows], elements);
  return elements * form.width + (elements / row) * ceilDiv(row, form.group) * form.scale;
}

const perParameter = (form) => (form.group ? fraction(form.width * form.group + form.scale, form.group) : fraction(form.width));
const layoutName = (row) => `${row.optimizer}, ${row.precision}`;
const masterName = (row) => (among(row.master, facts.remainders) ? "remainder" : "master");
const autocast = (row) => row.weights !== row.compute;

function statesOf(row, amsgrad) {
  const states = row.master === null ? [] : [[masterName(row), row.master]];
  states.push(["exp_avg", row.exp_avg], ["exp_avg_sq", row.exp_avg_sq]);
  return amsgrad ? [...states, ["max_exp_avg_sq", row.exp_avg_sq]] : states;
}

const bytesPerParameter = (row, amsgrad) =>
  statesOf(row, amsgrad).map(([, form]) => perParameter(form)).reduce(plus, plus(perParameter(row.weights), perParameter(row.gradients)));

function movedBesidesStates(row) {
  const rewritten = row.master !== null && masterName(row) === "master";
  return plus(perParameter(row.gradients), scaled(perParameter(row.weights), rewritten ? 1n : 2n));
}

const needsRows = (row) => statesOf(row, false).some(([, form]) => form.without_rows !== null);

export function layout(optimizer, precision, { moments = null, master = null, gradients = null } = {}) {
  oneOf("optimizer", optimizer, facts.optimizers);
  oneOf("precision", precision, facts.precisions);
  const has = layouts.filter((row) => row.optimizer === optimizer).map((row) => row.precision);
  if (!has.includes(precision)) {
    throw new Refused(`Expected precision to be one of ${has.join(", ")} for optimizer ${repr(optimizer)}, but got ${repr(precision)}`);
  }
  let row = layouts.find((one) => one.optimizer === optimizer && one.precision === precision);
  if (gradients !== null) {
    oneOf("gradients", gradients, facts.gradients);
    row = { ...row, gradients: formats[gradients] };
  }
  if (moments !== null) row = withMoments(row, moments);
  if (master !== null) {
    if (!row.master_allowed.length) {
      throw new Refused(`master is ${repr(master)}, but the format of the master of optimizer ${repr(optimizer)} is fixed; leave master out, or choose optimizer 'te-master'`);
    }
    oneOf("master", master, row.master_allowed);
    row = { ...row, master: formats[master] };
  }
  return optimizer.startsWith("te") ? withScales(row) : row;
}

function withMoments(row, moments) {
  const given = moments.split(",").map((name) => name.trim());
  if (!row.moments_allowed.length) {
    throw new Refused(`moments is ${repr(moments)}, but the format of the moments of optimizer ${repr(row.optimizer)} is fixed; leave moments out`);
  }
  if (given.length > 2) throw new Refused(`Expected moments to be one format, or two separated by a comma, but got ${repr(moments)}`);
  for (const name of given) oneOf("moments", name, row.moments_allowed);
  if (row.optimizer.startsWith("halfstep") && given[0] !== given.at(-1)) {
    throw new Refused(`Expected moments to be one format for optimizer ${repr(row.optimizer)}, but got ${repr(moments)}: choose one of ${row.moments_allowed.join(", ")} for both moments`);
  }
  const second = facts.second_moments[given.at(-1)] ?? given.at(-1);
  return { ...row, exp_avg: formats[given[0]], exp_avg_sq: formats[second] };
}

function withScales(row) {
  const states = [row.exp_avg, row.exp_avg_sq, ...(row.master === null || row.master.name === "int16" ? [] : [row.master])];
  const scalars = sum(states.map((state) => facts.te_scales[state.name]));
  return { ...row, scalars, temporary: 4n * BigInt(states.filter((state) => among(state, ["fp16", "fp8"])).length) };
}

// ------------------------------------------------------------------------------------------------------- models.py

const tensor = (shape, kind = "matrix") => ({ shape, kind, elements: product(shape) });
const isCast = (one) => one.kind === "matrix" || one.kind === "bias";
const elementsOf = (unit) => sum(unit.tensors.map((one) => one.elements));
const tensorsOf = (units) => units.flatMap((unit) => unit.tensors.map((one) => [one, unit.count]));
const parametersOf = (units) => sum(units.map((unit) => unit.count * elementsOf(unit)));

export function transformer(model) {
  if (!facts.norms.includes(model.norm)) throw new Refused(`Expected norm to be 'layer' or 'rms', but got ${repr(model.norm)}`);
  divides("heads", model.heads, "hidden", model.hidden, "every head needs the same width");
  divides("kv_heads", kvOf(model), "heads", model.heads, "every key needs the same number of queries");
  return model;
}

const kvOf = (model) => model.kv_heads ?? model.heads;
const kvWidth = (model) => (model.hidden / model.heads) * kvOf(model);
const mlpOf = (model) => model.ffn ?? 4n * model.hidden;

function checkParallel(model, t, sequenceParallel = false) {
  const remedy = "tensor parallelism gives every GPU equal parts: choose another --tp or size";
  const sizes = [["heads", model.heads], ["kv_heads", kvOf(model)], ["ffn", mlpOf(model)], ["vocab", model.vocab]];
  if (sequenceParallel) sizes.push(["seq", model.seq]);
  for (const [name, size] of sizes) divides("tensor_parallel", t, name, size, remedy);
}

function unitsOf(model, t = 1n) {
  checkParallel(model, t);
  const h = model.hidden;
  const [qkv, f] = [(h + 2n * kvWidth(model)) / t, mlpOf(model) / t];
  const linear = (rows, columns) => [tensor([rows, columns]), ...(model.biases ? [tensor([rows], "bias")] : [])];
  const norm = () => [tensor([h], "norm"), ...(model.norm === "layer" ? [tensor([h], "norm")] : [])];
  const block = [...norm(), ...linear(qkv, h), ...linear(h, h / t), ...norm()];
  for (let i = 0; i < (model.gated ? 2 : 1); i++) block.push(...linear(f, h));
  block.push(...linear(h, f));
  const root = [tensor([model.vocab / t, h], model.tied ? "matrix" : "embedding")];
  if (model.positions) root.push(tensor([model.seq, h], "embedding"));
  if (model.final_norm) root.push(...norm());
  if (!model.tied) root.push(tensor([model.vocab / t, h]));
  return [{ tensors: block, count: model.layers, root: false }, { tensors: root, count: 1n, root: true }];
}

function adaptersOf(model, rank) {
  const [block] = unitsOf(model);
  const tensors = block.tensors
    .filter(({ shape }) => shape.length === 2)
    .flatMap(({ shape: [rows, columns] }) => [tensor([rank, columns]), tensor([rows, rank])]);
  return [{ tensors, count: block.count, root: false }];
}

function unitsWithAdapters(model, rank) {
  const [block, root] = unitsOf(model);
  return [{ ...block, tensors: [...block.tensors, ...adaptersOf(model, rank)[0].tensors] }, root];
}

// ----------------------------------------------------------------------------------------------------- sharding.py

const keepsRows = (how) => facts.whole_rows.includes(how.by);
// Local tensors are lists [elements, number]; `rows` has the elements in a row of each of `states`, or is empty.
const elements = (held) => sum(held.map(([size, count]) => size * count));
const rowOf = ({ shape, elements: size }) => (shape.length > 1 && size >= facts.least_coded ? size / shape[0] : 0n);

function rowsOf({ shape, elements: size }, ways, rank) {
  const chunk = ceilDiv(shape[0], ways);
  return (size / shape[0]) * (rank === null ? chunk : most(0n, least(chunk, shape[0] - rank * chunk)));
}

// How many of `many` parameters of one size each rank gets, where each goes to the rank with the least load so far, and
// among equals to the first; `loads` grows. In Numbers, or in BigInts where sums reach 2^53.
function assign(loads, size, many, zero) {
  const above = typeof zero === "bigint" ? ceilDiv : (a, b) => Math.ceil(a / b);
  const below = (level) => loads.map((load) => (load < level ? above(level - load, size) : zero));
  const total = (counts) => counts.reduce((a, b) => a + b, zero);
  // The largest level to which `many` parameters are enough: all that begin below it are placed.
  let low = loads.reduce((a, b) => (b < a ? b : a));
  let high = low + size * many + size;
  const one = typeof zero === "bigint" ? 1n : 1;
  while (high - low > one) {
    const middle = typeof zero === "bigint" ? (low + high) / 2n : Math.floor((low + high) / 2);
    if (total(below(middle)) <= many) low = middle;
    else high = middle;
  }
  const counts = below(low);
  let left = many - total(counts);
  for (let rank = 0; left > zero && rank < loads.length; rank++) {
    if (loads[rank] + counts[rank] * size === low) {
      counts[rank] += one;
      left -= one;
    }
  }
  for (let rank = 0; rank < loads.length; rank++) loads[rank] += counts[rank] * size;
  return counts;
}

function assigned(whole, rows, ways, rank) {
  const safe = 4n * elements(whole) < 1n << 53n;
  const as = safe ? Number : (x) => x;
  const loads = Array(Number(ways)).fill(as(0n));
  const order = whole.map((_, index) => index).sort((a, b) => (whole[b][0] > whole[a][0]) - (whole[b][0] < whole[a][0]));
  const given = order.map((index) => assign(loads, as(whole[index][0]), as(whole[index][1]), as(0n)));
  const largest = loads.reduce((a, b) => (b > a ? b : a));
  const mine = rank === null ? loads.indexOf(largest) : Number(rank);
  const states = order.map((index, place) => [whole[index][0], BigInt(given[place][mine])]);
  return { states, rows: order.map((index) => rows[index]) };
}

function shardOf(units, how, ways, rank = null, shaped = true) {
  const tensors = tensorsOf(units);
  const whole = tensors.map(([one, count]) => [one.elements, count]);
  const rows = tensors.map(([one]) => (shaped ? rowOf(one) : one.elements));
  const same = (held, rowed = []) => ({ weights: held, gradients: held, states: held, rows: rowed });
  if (ways === 1n || how.by === "nothing") return same(whole, rows);
  if (how.by === "flat" || (how.by === "parameters" && !shaped)) {
    const part = [[ceilDiv(parametersOf(units), ways), 1n]];
    return { weights: whole, gradients: how.gradients ? part : whole, states: part, rows: shaped ? [] : [part[0][0]] };
  }
  if (how.by === "parameters") return { weights: whole, gradients: whole, ...assigned(whole, rows, ways, rank) };
  if (how.by === "units") return same(units.map((unit) => [ceilDiv(elementsOf(unit), ways), unit.count]));
  if (how.by === "elements") return same(whole.map(([size, count]) => [ceilDiv(size, ways), count]));
  const [largest, held] = [null, rank].map((which) => tensors.map(([one, count]) => [rowsOf(one, ways, which), count]));
  return { weights: largest, gradients: largest, states: held, rows: shaped ? rows : held.map(([size]) => size) };
}

function padded(units, how, ways, shaped) {
  if (how.by === "parameters") return parametersOf(units);
  const mine = shardOf(units, how, ways, null, shaped);
  return ways * elements(how.by === "flat" ? mine.states : mine.gradients);
}

function groups(how, ranks, shard) {
  if (how.name !== "hsdp") {
    if (shard !== null) {
      throw new Refused(`shard is ${shard}, but strategy ${repr(how.name)} has no groups; leave it out, or choose 'hsdp'`);
    }
    return how.states ? ranks : 1n;
  }
  if (shard === null) throw new Refused("strategy is 'hsdp', but shard is not given; give the GPUs of one group, as --shard 8");
  divides("shard", shard, "the number of data-parallel GPUs", ranks, "every group needs as many GPUs");
  return shard;
}

const collective = (name, what, bytes, each, ranks, count, note = "") =>
  ({ name, what, bytes, per_parameter: each, ranks, times: count, note });
const ring = (ranks) => fraction(ranks - 1n, ranks);

function communication(how, ranks, ways, given) {
  if (ranks === 1n) return [];
  const [count, once] = [how.gradients ? given.accumulate : 1n, ring(ways)];
  const sent = (name, what, share, to = ways, many = count, note = "") => {
    const [width, number] = what.includes("gradients") ? [given.gradientWidth, given.parameters] : [given.weightWidth, given.gathered];
    const each = scaled(times(share, width), many);
    return collective(name, what, ceiling(scaled(each, number)), each, to, many, note);
  };
  const summed = sent("all-reduce", "gradients", scaled(ring(ranks), 2n), ranks, 1n);
  if (how.by === "nothing") return [summed];
  if (how.by === "parameters") return [summed, sent("broadcast", "weights", once, ranks, 1n, "from each weight's owner")];
  const scattered = sent("reduce-scatter", "gradients", once);
  if (!how.gathers) return [scattered, sent("all-gather", "weights", once, ways, 1n)];
  const again = times(once, fraction(given.gathered - given.kept, given.gathered));
  const note = given.kept ? "the root unit stays gathered" : "";
  const forward = sent("all-gather", "weights, forward", once);
  const backward = sent("all-gather", "weights, backward", again, ways, count, note);
  const divided = ways > 1n ? [forward, backward, scattered] : [];
  const replicas = ranks / ways;
  if (replicas === 1n) return divided;
  return [...divided, sent("all-reduce", "shards of gradients", times(scaled(ring(replicas), 2n), fraction(1n, ways)), replicas)];
}

function overTheBus(row, how, mine, accumulate) {
  const [gradients, down] = how.gradients || how.name === "single" ? [mine.gradients, accumulate] : [mine.states, 1n];
  const [weights, up] = how.offloads === "states" ? [mine.states, 1n] : [mine.weights, 2n * accumulate];
  return [
    collective("copy to the host", "gradients", elements(gradients) * row.gradients.width * down, null, 1n, down),
    collective("copy from the host", "weights", elements(weights) * row.weights.width * up, null, 1n, up),
  ];
}

function betweenLayers(row, model, batch, seq, t, accumulate) {
  const tokens = batch * seq;
  const activation = tokens * model.hidden * row.compute.width;
  return [
    ["activations", activation, 4n * model.layers * accumulate],
    ["activations at embedding and head", activation, 2n * accumulate],
    ["loss", 4n * tokens, 3n * accumulate],
  ].map(([what, size, count]) => collective("all-reduce", what, ceilDiv(2n * (t - 1n) * size * count, t), null, t, count));
}

// --------------------------------------------------------------------------------------------------------- work.py

const linearFlops = (tokens, inputs, outputs) => 2n * tokens * inputs * outputs;
const scoreFlops = (model, seq) => 4n * seq ** 2n * model.hidden;

function layerFlops(model, seq) {
  const [h, kv, f] = [model.hidden, kvWidth(model), mlpOf(model)];
  const projections = 2n * linearFlops(seq, h, h) + 2n * linearFlops(seq, h, kv);
  return projections + scoreFlops(model, seq) + (model.gated ? 3n : 2n) * linearFlops(seq, h, f);
}

const forwardFlops = (model, batch, seq) =>
  batch * (model.layers * layerFlops(model, seq) + linearFlops(seq, model.hidden, model.vocab));
const adapterFlops = (model, batch, seq, rank) => (rank ? 2n * batch * seq * parametersOf(adaptersOf(model, rank)) : 0n);

function trainingFlops(model, batch, seq, rank) {
  const forward = forwardFlops(model, batch, seq);
  if (!rank) return 3n * forward;
  return 2n * forward + batch * model.layers * scoreFlops(model, seq) + 3n * adapterFlops(model, batch, seq, rank);
}

function recomputedFlops(model, batch, seq, checkpointing) {
  if (checkpointing === "none") return 0n;
  return batch * model.layers * (checkpointing === "selective" ? scoreFlops(model, seq) : layerFlops(model, seq));
}

function layerActivations(model, batch, seq, width, t, sequenceParallel, scores = true) {
  const [tokens, h] = [batch * seq, model.hidden];
  const replicated = 4n * width * tokens * h + (model.dropout ? 2n * tokens * h : 0n);
  const between = (model.gated ? 4n : 2n) * mlpOf(model);
  let sharded = width * tokens * (2n * h + 2n * kvWidth(model) + between);
  if (model.flash) sharded += 4n * model.heads * tokens;
  else if (scores) sharded += model.heads * batch * seq ** 2n * (model.dropout ? 2n * width + 1n : width);
  return sequenceParallel ? (replicated + sharded) / t : replicated + sharded / t;
}

function activations(model, batch, seq, width, t, sequenceParallel, checkpointing) {
  checkParallel(model, t, sequenceParallel);
  const layer = (scores) => layerActivations(model, batch, seq, width, t, sequenceParallel, scores);
  const share = sequenceParallel ? t : 1n;
  const states = (width * batch * seq * model.hidden) / share;
  const ends = states * (model.final_norm ? 2n : 1n) + (model.dropout ? (batch * seq * model.hidden) / share : 0n);
  if (checkpointing === "none" || checkpointing === "selective") {
    return { saved: model.layers * layer(checkpointing === "none"), recomputed: 0n, ends };
  }
  const together = checkpointing === "full" ? 1n : isqrt(model.layers - 1n) + 1n;
  return { saved: ceilDiv(model.layers, together) * states, recomputed: together * layer(true), ends };
}

// -------------------------------------------------------------------------------------------------------- plans.py

const strategies = Object.fromEntries(facts.strategies.map((how) => [how.name, how]));
const part = (name, bytes, each, divisor, phase, exact, place = "gpu", note = "") =>
  ({ name, bytes, per_parameter: each, divisor, phase, exact, place, note });
const able = (fine) => facts.strategies.filter(fine).map((how) => how.name).join(", ");

// The arguments of `plan` of Python by their names there; those that are missing have its defaults.
export function plan(given) {
  const { params = null, model = null, gpus, strategy, shard, tensor_parallel: t, sequence_parallel: sequenceParallel } = given;
  const { precision, optimizer, moments, master, gradients, accumulator, amsgrad, accumulate, checkpointing } = given;
  const { offload, bucket_view: bucketView, compress, step_in_backward: bucketBytes, lora, rank } = given;
  divides("tensor_parallel", t, "gpus", gpus, "every replica needs as many GPUs");
  const ranks = gpus / t;
  const chosen = strategy ?? (ranks === 1n ? "single" : "ddp");
  oneOf("strategy", chosen, Object.keys(strategies));
  const how = strategies[chosen];
  const mirrored = facts.mirrored.includes(how.name);
  if (how.name === "single" && ranks > 1n) {
    throw new Refused(`strategy is 'single', but there are ${ranks} data-parallel GPUs; choose 'ddp', or gpus=${t}`);
  }
  if (offload && !how.offloads) {
    throw new Refused(`Expected strategy to be ${able((one) => one.offloads)} with offload=True, but got ${repr(how.name)}, which offloads nothing`);
  }
  if (offload && mirrored && !optimizer.startsWith("halfstep")) {
    throw new Refused(`Expected optimizer to be one of halfstep's with offload=True and strategy ${repr(how.name)}, which stands for halfstep.integrations.offload, but got ${repr(optimizer)}: leave offload out`);
  }
  if (sequenceParallel && t === 1n) throw new Refused("Expected tensor_parallel to be 2 or more with sequence_parallel=True, but got 1");
  const row = layout(optimizer, precision, { moments, master, gradients });
  if (amsgrad && !row.amsgrad) throw new Refused(`amsgrad is True, but optimizer ${repr(optimizer)} does not support it; leave it out`);
  if (needsRows(row) && !keepsRows(how)) {
    throw new Refused(`Expected strategy to be ${able(keepsRows)} with moments in 8 bits, whose blocks lie within rows of parameters, but got ${repr(how.name)}: choose one of these, or moments 'bf16'`);
  }
  if (bucketBytes !== null) checkStepInBackward(how, optimizer, accumulate, accumulator, compress);
  for (const [name, value] of [["accumulator", accumulator], ["compress", compress]]) {
    if (value !== null) oneOf(name, value, facts.gradients);
  }
  let held = model === null ? [{ tensors: [tensor([ceilDiv(params, t)])], count: 1n, root: true }] : unitsOf(model, t);
  let everything = held;
  if (lora !== null) {
    checkLora(model, how, t, offload, bucketBytes);
    [held, everything] = [adaptersOf(model, lora), unitsWithAdapters(model, lora)];
  }
  const ways = groups(how, ranks, shard);
  if (rank !== null && rank >= ways) throw new Refused(`Expected rank to be an integer from 0 to ${ways - 1n}, but got ${rank}`);
  const [batch, seq] = microBatch(model, given.batch, given.seq, checkpointing);
  const shaped = model !== null;
  const summed = accumulator === null ? null : formats[accumulator];
  const sent = compress === null ? (summed ?? row.gradients) : formats[compress];
  const mine = shardOf(held, how, ways, rank, shaped);
  const inputs = { row, how, ranks, ways, units: held, shaped, mine, summed, sent, amsgrad, offload, bucketView, bucketBytes, everything };

  const parts = lora === null ? [] : [frozen(inputs, model)];
  parts.push(...stored(inputs), ...buckets(inputs), ...gathered(inputs), ...autocastCopies(inputs));
  if (model !== null && batch !== null) parts.push(...activationParts(row, model, batch, seq, t, sequenceParallel, checkpointing));
  parts.push(...temporaries(inputs));
  let total = model === null ? params : parametersOf(unitsOf(model));
  if (lora !== null) total = parametersOf(everything);
  const roots = ["rows", "units"].includes(how.by) && everything.length > 1 ? everything.filter((unit) => unit.root) : [];
  const messages = communication(how, ranks, ways, {
    parameters: padded(held, how, ways, shaped),
    gradientWidth: perParameter(sent),
    weightWidth: perParameter(how.gathers ? row.compute : row.weights),
    accumulate,
    kept: padded(roots, how, ways, shaped),
    gathered: padded(everything, how, ways, shaped),
  });
  if (offload) messages.push(...overTheBus(row, how, mine, accumulate));
  if (model !== null && t > 1n && batch !== null) messages.push(...betweenLayers(row, model, batch, seq, t, accumulate));
  const states = statesOf(row, amsgrad).map(([name]) => name);
  const rewritten = sum(parts.filter((one) => states.includes(one.name)).map((one) => one.bytes));
  const moved = plus(scaled(movedBesidesStates(row), elements(mine.states)), fraction(2n * rewritten));
  return {
    parameters: total,
    settings: {
      params: total, model, gpus, strategy: how.name, shard, tensor_parallel: t, sequence_parallel: sequenceParallel,
      precision, optimizer, moments, master, gradients: row.gradients.name, accumulator, amsgrad, batch, seq, accumulate,
      checkpointing, offload, bucket_view: bucketView, compress, step_in_backward: bucketBytes, lora, rank,
    },
    layout: row,
    parts,
    totals: totalsOf(parts),
    communication: messages,
    bytes_sent: sum(messages.filter((one) => one.ranks > 1n).map((one) => one.bytes)),
    work: workOf(model, total, batch, seq, t, accumulate, checkpointing, lora ?? 0n),
    step_traffic: ceiling(moved),
  };
}

export function asDict(made) {
  const number = (value) => (value === null ? null : nearestDouble(value.n, value.d));
  const numbered = (one) => ({ ...one, per_parameter: number(one.per_parameter) });
  const { layout: row, settings } = made;
  return {
    parameters: made.parameters,
    settings,
    layout: {
      name: layoutName(row),
      bytes_per_parameter: number(bytesPerParameter(row, settings.amsgrad)),
      note: row.note,
      source: row.source,
    },
    parts: made.parts.map(numbered),
    totals: made.totals,
    communication: made.communication.map(numbered),
    bytes_sent: made.bytes_sent,
    work: made.work,
    step_traffic: made.step_traffic,
  };
}

function microBatch(model, batch, seq, checkpointing) {
  oneOf("checkpointing", checkpointing, facts.checkpointing);
  if (model === null && checkpointing !== "none") {
    throw new Refused(`checkpointing is ${repr(checkpointing)}, but activations are unknown without a model: pass model as well`);
  }
  if (seq !== null && model !== null && model.positions && seq > model.seq) {
    throw new Refused(`Expected seq to be from 1 to ${model.seq}, the positions of the model, but got ${seq}`);
  }
  return [batch, seq ?? (model === null ? null : model.seq)];
}

const statesAt = (inputs) => (inputs.offload ? "host" : "gpu");

function frozen({ row, how, ways }, model) {
  const mine = shardOf(unitsOf(model), how, ways);
  const size = row.weights.width * elements(mine.weights);
  return part("frozen weights", size, perParameter(row.weights), how.weights ? ways : 1n, "always", true, "gpu", row.weights.name);
}

function stored(inputs) {
  const { row, how, mine, offload, ways } = inputs;
  const found = [];
  const rest = offload && how.offloads === "all" ? "host" : "gpu";
  const plain = (held) => held.map(([size, count]) => [size, count, 0n]);
  const states = mine.states.map(([size, count], i) => [size, count, mine.rows[i] ?? 0n]);
  const listed = [
    ["weights", row.weights, plain(mine.weights), how.weights, rest],
    ["gradients", row.gradients, plain(mine.gradients), how.gradients, rest],
    ["accumulated gradients", inputs.summed, plain(mine.gradients), how.gradients, rest],
    ...statesOf(row, inputs.amsgrad).map(([name, form]) => [name, form, states, how.states, statesAt(inputs)]),
  ];
  for (const [name, form, held, divided, place] of listed) {
    if (form === null) continue;
    const size = sum(held.map(([each, count, rowSize]) => count * bytesOf(form, each, rowSize)));
    const [divisor, each] = [divided ? ways : 1n, perParameter(form)];
    if ((name === "weights" || name === "gradients") && offload && facts.mirrored.includes(how.name)) {
      found.push(part(`${name} on the host`, size, each, divisor, "always", true, "host", form.name));
    }
    if (name === "gradients" && offload && how.name === "single") {
      found.push(part(name, least(size, inFlight(inputs)), null, divisor, "backward", false, place, "on their way to the host"));
    } else if (name === "gradients" && inputs.bucketBytes !== null) {
      const [held, note] = bucket(inputs, size);
      found.push(part(name, held, null, divisor, "backward", false, place, note));
    } else found.push(part(name, size, each, divisor, "always", true, place, form.name));
  }
  if (inputs.shaped && row.scalars) {
    const size = row.scalars * sum(mine.states.map(([, count]) => count));
    found.push(part("scalars", size, null, 1n, "always", !row.optimizer.startsWith("te"), statesAt(inputs), "step counts, scales"));
  }
  return found;
}

const largestGradient = ({ row, mine }) => mine.gradients.map(([size]) => bytesOf(row.gradients, size)).reduce(most, 0n);
const inFlight = (inputs) => 2n * (inputs.bucketBytes ?? facts.usual_bucket) + (inputs.shaped ? largestGradient(inputs) : 0n);

function bucket(inputs, size) {
  const { row, how, ways, ranks, mine, shaped, units } = inputs;
  let one = inputs.bucketBytes;
  if (shaped && how.gathers && ways > 1n) {
    const sizes = units.map((unit) =>
      sum(shardOf([{ ...unit, count: 1n }], how, ways).gradients.map(([each, count]) => count * bytesOf(row.gradients, each))));
    one += 2n * sizes.reduce(most);
  } else if (shaped) one += largestGradient(inputs) - 1n;
  one = least(one, size);
  if (how.name !== "ddp" || ranks === 1n) return [one, "one bucket, stepped in the backward"];
  const added = shaped ? 16n * sum(mine.gradients.map(([, count]) => count)) : 0n;
  return [2n * one + added, "one bucket filled and one reduced, stepped in the backward"];
}

function checkStepInBackward(how, optimizer, accumulate, accumulator, compress) {
  if (!facts.stepping_in_backward.includes(how.name)) {
    throw new Refused(`Expected strategy to be ${facts.stepping_in_backward.join(", ")} with step_in_backward, but got ${repr(how.name)}, which keeps all gradients`);
  }
  if (!optimizer.startsWith("halfstep")) {
    throw new Refused(`Expected optimizer to be one of halfstep's with step_in_backward, but got ${repr(optimizer)}: leave step_in_backward out`);
  }
  if (accumulate > 1n || accumulator !== null) {
    throw new Refused(`Expected accumulate to be 1 and accumulator None with step_in_backward, since accumulated gradients exist until the last micro-batch, but got ${accumulate} and ${repr(accumulator)}`);
  }
  if (how.name === "ddp" && compress !== null) {
    throw new Refused(`Expected compress to be None with step_in_backward and strategy 'ddp', but got ${repr(compress)}: buckets are reduced in the format of the gradients`);
  }
}

function checkLora(model, how, t, offload, bucketBytes) {
  if (model === null) throw new Refused("Expected model with lora, whose adapters stand beside its matrices, but got None: pass model");
  if (!facts.with_adapters.includes(how.name)) {
    throw new Refused(`Expected strategy to be ${facts.with_adapters.join(", ")} with lora, but got ${repr(how.name)}`);
  }
  for (const [name, value, wanted] of [["tensor_parallel", t, 1n], ["offload", offload, false], ["step_in_backward", bucketBytes, null]]) {
    if (value !== wanted) throw new Refused(`Expected ${name} to be ${repr(wanted)} with lora, but got ${repr(value)}: leave one of them out`);
  }
}

function buckets({ how, row, units, ranks, bucketBytes, bucketView, sent }) {
  const [width, local, found] = [row.gradients.width, parametersOf(units), []];
  if (ranks === 1n) return found;
  if (how.by === "flat") {
    const size = least(facts.deepspeed_bucket, local) * width;
    found.push(part("buckets", size, null, 1n, "backward", false, "gpu", "5e8 gradients, DeepSpeed's default"));
  }
  if (bucketBytes !== null) return found;
  if (how.buckets && !bucketView) {
    found.push(part("buckets", local * width, fraction(width), 1n, "always", true, "gpu", "DDP's copy of the gradients"));
  }
  if (how.buckets && sent.width < width) {
    const size = (least(facts.ddp_bucket, local * width) * sent.width) / width;
    found.push(part("compressed bucket", size, null, 1n, "backward", false, "gpu", "one of 25 MiB on its way"));
  }
  return found;
}

function gathered({ how, row, ways, shaped, units, everything, sent }) {
  if (!how.gathers || ways === 1n || !shaped) return [];
  const blocks = everything.filter((unit) => !unit.root);
  const largest = blocks.map(elementsOf).reduce(most, 0n);
  const root = parametersOf(everything.filter((unit) => unit.root));
  const width = row.compute.width;
  const weights = (root + largest * (sum(blocks.map((unit) => unit.count)) > 1n ? 2n : 1n)) * width;
  const trained = units.filter((unit) => !unit.root).map(elementsOf).reduce(most, 0n);
  const gradients = (trained || root) * (width + sent.width);
  return [
    part("gathered weights", weights, null, 1n, "backward", false, "gpu", "the root and two units"),
    part("unreduced gradients", gradients, null, 1n, "backward", false, "gpu", "largest unit, and its copy to reduce"),
  ];
}

function autocastCopies({ row, how, everything, shaped }) {
  if (!autocast(row) || how.gathers) return [];
  const cast = sum(tensorsOf(everything).filter(([one]) => isCast(one)).map(([one, count]) => one.elements * count));
  const each = perParameter(row.compute);
  return [part("cast weights", cast * row.compute.width, each, 1n, "backward", shaped, "gpu", "by autocast, kept for backward")];
}

function activationParts(row, model, batch, seq, t, sequenceParallel, checkpointing) {
  const width = row.compute.width;
  const found = activations(model, batch, seq, width, t, sequenceParallel, checkpointing);
  const logits = (batch * seq * model.vocab) / t;
  const loss = width < 4n ? [logits * (4n + width), "log-softmax, and 16-bit logits"] : [logits * 4n, "log-softmax"];
  return [
    ["activations", found.saved, "saved by the blocks"],
    ["recomputed", found.recomputed, "blocks computed again at once"],
    ["outer activations", found.ends, "around the blocks"],
    ["logits", 4n * logits, "in fp32"],
    ["loss", ...loss],
  ].filter(([, size]) => size).map(([name, size, note]) => part(name, size, null, 1n, "backward", false, "gpu", note));
}

function temporaries(inputs) {
  const { row, how, mine, ways } = inputs;
  if (!row.temporary) return [];
  const note = facts.temporaries[row.optimizer] ?? facts.other_temporaries;
  const size = row.temporary * elements(mine.states);
  return [part("step temporaries", size, fraction(row.temporary), how.states ? ways : 1n, "step", false, statesAt(inputs), note)];
}

function totalsOf(parts) {
  const of = (fine) => sum(parts.filter(fine).map((one) => one.bytes));
  const [state, backward, step] = ["always", "backward", "step"].map((phase) => of((one) => one.phase === phase && one.place === "gpu"));
  return { state, backward, step, peak: state + most(backward, step), host: of((one) => one.place === "host") };
}

function workOf(model, total, batch, seq, t, accumulate, checkpointing, lora) {
  if (batch === null || seq === null) return null;
  if (model === null) {
    const forward = ceilDiv(2n * total * batch * seq * accumulate, t);
    return { forward, training: 3n * forward, hardware: 3n * forward, exact: false };
  }
  const forward = (accumulate * (forwardFlops(model, batch, seq) + adapterFlops(model, batch, seq, lora))) / t;
  const training = (accumulate * trainingFlops(model, batch, seq, lora)) / t;
  const again = (accumulate * recomputedFlops(model, batch, seq, checkpointing)) / t;
  return { forward, training, hardware: training + again, exact: true };
}

export function utilisation(flops, seconds, peak) {
  if (!(seconds > 0 && seconds < Infinity)) throw new Refused(`Expected seconds to be a number above 0, but got ${floatText(seconds)}`);
  return Number(flops) / seconds / peak;
}

// The largest plan whose peak is at most `memory` bytes, or null. `what` is "params", "layers" or "batch".
export function fit(what, memory, given) {
  let at;
  if (what === "params") {
    const { params, model, ...rest } = given;
    at = (size) => plan({ ...rest, checkpointing: "none", params: size });
  } else if (!given.model) {
    throw new Refused(`Expected model to be a Transformer with what=${repr(what)}, but got none: pass model=Transformer(...), or fit 'params'`);
  } else if (what === "layers") at = (size) => plan({ ...given, model: { ...given.model, layers: size } });
  else at = (size) => plan({ ...given, batch: size });

  let [low, high, best] = [1n, 2n, at(1n)];
  if (best.totals.peak > memory) return null;
  for (let more = at(high); more.totals.peak <= memory; more = at(high)) {
    [low, best, high] = [high, more, 2n * high];
    if (high > 1n << 70n) {
      throw new Refused(`Expected strategy not to offload everything that grows with what=${repr(what)}, but got ${repr(best.settings.strategy)} with offload=True: leave offload out, or fit 'batch' of a model`);
    }
  }
  while (high - low > 1n) {
    const middle = (low + high) / 2n;
    const tried = at(middle);
    if (tried.totals.peak <= memory) [low, best] = [middle, tried];
    else high = middle;
  }
  return best;
}

const gib = 1n << 30n;
const cards = Object.fromEntries(facts.cards.map((one) => [one.name, one]));

export function card(name) {
  oneOf("card", name.toLowerCase(), Object.keys(cards));
  return cards[name.toLowerCase()];
}

// `reserve` is a fraction: a share of the memory below 1, or a number of bytes.
export function usable(gpu, reserve) {
  const share = reserve.n < reserve.d;
  const left = fraction(gpu.memory * reserve.d - (share ? gpu.memory : 1n) * reserve.n, reserve.d);
  const whole = left.n / left.d;
  if (whole < 1n) {
    const text = reserve.d === 1n ? `${reserve.n}` : `${reserve.n}/${reserve.d}`;
    throw new Refused(`Expected reserve to be a share from 0 to below 1, or fewer bytes than the ${general(nearestDouble(gpu.memory, gib))} GiB of ${repr(gpu.name)}, but got ${text}`);
  }
  return whole;
}
