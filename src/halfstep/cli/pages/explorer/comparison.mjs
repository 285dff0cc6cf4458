// Two formats side by side, as src/halfstep/cli/formats/{properties,shared_values,compare}.py.

const size = (f) => 1n << f.bits;
const nans = (f) => ({ ieee: 2n * ((1n << f.m) - 1n), fn: 2n, fnuz: 1n, scale: 1n })[f.kind] ?? 0n;
// Number of distinct values. Infinities count, NaNs do not, and both zeros count as one.
const valuesOf = (f) => size(f) - nans(f) - BigInt(f.negativeZero);
const lowestExponent = (f) => (f.subnormals ? f.emin - f.m : f.emin);
const maximum = (a, b) => (a > b ? a : b);
const minimum = (a, b) => (a < b ? a : b);

// The s for which the values in [2^exponent, 2^(exponent + 1)) are the multiples of 2^s.
const stepExponent = (f, exponent) => (f.kind === "integer" ? 0n : maximum(exponent, f.emin) - f.m);

// Number of values in [2^exponent, 2^(exponent + 1)), up to `last`, that all of these formats have.
function sharedIn(exponent, these, last) {
  if (these.some((f) => exponent < lowestExponent(f))) return 0n;
  const step = these.map((f) => stepExponent(f, exponent)).reduce(maximum);
  const whole = 1n << (exponent - step);
  if (compare(last, powerOf2(exponent + 1n)) >= 0) return whole;
  return maximum(0n, minimum(whole, floor(times(last, powerOf2(-step))) - whole + 1n));
}

const least = (a, b) => (compare(a, b) < 0 ? a : b);

// Number of values that both formats have.
function sharedValues(a, b) {
  const tops = [least(largest(a), largest(b))];
  if (a.signed && b.signed) tops.push(least(absolute(lowest(a)), absolute(lowest(b))));
  let count = BigInt(a.kind !== "scale" && b.kind !== "scale");
  if (a.infinityCode !== null && b.infinityCode !== null) count += 2n;
  const last = minimum(a.emax, b.emax) + 1n;
  for (let e = maximum(lowestExponent(a), lowestExponent(b)); e <= last; e++) {
    for (const top of tops) count += sharedIn(e, [a, b], top);
  }
  return count;
}

// Runs of binades with the same numbers of positive values: { from, to, counts: [of a, of b, of both] }.
function binades(a, b) {
  const runs = [];
  const tops = [largest(a), largest(b)];
  const last = maximum(a.emax, b.emax);
  for (let e = minimum(lowestExponent(a), lowestExponent(b)); e <= last; e++) {
    const counts = [sharedIn(e, [a], tops[0]), sharedIn(e, [b], tops[1]), sharedIn(e, [a, b], least(...tops))];
    const run = runs.at(-1);
    if (run && run.counts.every((count, i) => count === counts[i])) run.to = e;
    else runs.push({ from: e, to: e, counts });
  }
  return runs;
}

// ------------------------------------------------------------------------------------------------------------ figures

// A number with a few digits, or with all of them if they fit nine columns.
function brief(number) {
  const whole = decimal(number);
  const text = number.negative && whole !== "0" ? whole?.slice(1) : whole;
  return text && text.length <= 9 ? whole : rounded(number, 4);
}

const powerText = (number) => `2^${floorLog2(number)} = ${brief(number)}`;

function integerRange(f) {
  const whole = floor(largest(f));
  if (f.kind === "integer") return whole;
  const one = powerOf2(0n);
  if (f.kind === "scale" || compare(largest(f), one) < 0 || compare(leastNumber(f), one) > 0) return 0n;
  return minimum(1n << precision(f), whole);
}
const integersText = (n) => (n > 1000000n && !(n & (n - 1n)) ? `2^${bitLength(n) - 1n}` : `${n}`);

// The names of properties and their texts.
function figures(f) {
  const digits = (1n << (f.kind === "integer" ? precision(f) : precision(f) - 1n)).toString().length - 1;
  const threshold = overflowThreshold(f);
  const special = [["inf", f.infinityCode], ["nan", f.nanCode]].filter(([, code]) => code !== null);
  const eps = f.kind === "integer" ? powerOf2(0n) : powerOf2(-f.m);
  return [
    ["sign/exponent/mantissa", `${Number(f.signed)}/${f.exponent}/${f.mantissa}, ${f.bits} bits` +
      (f.container ? ` in ${f.container}` : "")],
    ["bias", `${f.bias}`],
    ["largest", brief(largest(f))],
    ["lowest", brief(lowest(f))],
    ["overflow", `${overflows(threshold, f) ? "from" : "beyond"} ${brief(threshold)}`],
    ["least normal", powerText(leastNormal(f))],
    ["least above 0", powerText(leastNumber(f))],
    ["eps, 1 to next", powerText(eps)],
    ["integers, all to", integersText(integerRange(f))],
    ["digits kept", `${digits}`],
    ["digits to tell apart", `${maxDigits10(f)}`],
    ["p log10 2", (Number(precision(f)) * Math.log10(2)).toFixed(2)],
    ["values", grouped(valuesOf(f))],
    ["inf, nan", special.map(([name]) => name).join(" ") || "neither"],
    ["negative zero", f.negativeZero ? "yes" : "no"],
    ["codes", [...special, ["max", f.largest]].map(([name, code]) => `${name} ${codeText(code, f)}`).join(", ")],
  ];
}

// ---------------------------------------------------------------------------------------------------------- sentences

function rangeWords(a, b) {
  const further = {};
  for (const [way, one, other] of [["up", a.emax, b.emax], ["down", -lowestExponent(a), -lowestExponent(b)]]) {
    if (one === other) continue;
    const name = one > other ? a.name : b.name;
    (further[name] ??= []).push(`2^${one > other ? one - other : other - one} times further ${way}`);
  }
  const reaches = Object.entries(further).map(([name, ways]) => `${name} reaches ${ways.join(" and ")}`);
  return reaches.length ? [`${reaches.join(", ")}.`] : [];
}

function precisionWords(a, b) {
  const [fine, coarse] = stepExponent(a, 0n) <= stepExponent(b, 0n) ? [a, b] : [b, a];
  const ratio = stepExponent(coarse, 0n) - stepExponent(fine, 0n);
  const one = powerOf2(0n);
  const normalAt1 = (f) => compare(leastNumber(f), one) <= 0 && compare(one, largest(f)) <= 0;
  if (ratio === 0n || !normalAt1(a) || !normalAt1(b)) return [];
  return [`Near 1 ${fine.name}'s numbers are ${ratio <= 16n ? 1n << ratio : `2^${ratio}`} times closer together.`];
}

function percentText(part, whole) {
  if (part === 0n || part === whole) return part === 0n ? "none" : "all";
  return `${rounded(fraction(100n * part, whole), 3)} %`;
}

// The comparison of two formats in sentences.
function pairWords(a, b) {
  const shared = sharedValues(a, b);
  const [ofA, ofB] = [valuesOf(a), valuesOf(b)];
  const said = [...rangeWords(a, b), ...precisionWords(a, b)];
  if (shared === ofA && shared === ofB) return [...said, `Both have the same ${grouped(shared)} values.`];
  if (shared === ofA || shared === ofB) {
    const [inner, outer] = shared === ofA ? [a, b] : [b, a];
    return [...said, `${outer.name} holds every value of ${inner.name}: casting there and back loses nothing.`];
  }
  return [...said,
    `They share ${grouped(shared)} values: ${percentText(shared, ofA)} of ${a.name}'s ${grouped(ofA)} are exact in ` +
    `${b.name}, ${percentText(shared, ofB)} of ${b.name}'s ${grouped(ofB)} in ${a.name}.`];
}

// The numbers of both formats next to a finite number, from the least: [{ value, codes }]; the code is null in a format
// that does not have the number.
function valuesAround(number, a, b, each = 4n) {
  const found = [];
  for (const f of [a, b]) {
    const [low, high] = ends(f);
    const from = floorPlace(number, f);
    for (let place = maximum(low, from - each + 1n); place <= minimum(high, from + each); place++) {
      found.push(decode(placeCode(place, f, false), f));
    }
  }
  found.sort(compare);
  const codeIn = (value, f) => {
    const one = encoded(value, f);
    return one.outcome === "exact" ? one.code : null;
  };
  return found.filter((value, i) => !i || compare(value, found[i - 1]) !== 0)
    .map((value) => ({ value, codes: [codeIn(value, a), codeIn(value, b)] }));
}
