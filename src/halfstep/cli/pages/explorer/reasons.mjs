// Why a number becomes what it becomes, as src/halfstep/cli/formats/{values,rules,sentences}.py say it for rounding to
// nearest, and for the other modes.

const HALF = { type: "finite", negative: false, n: 1n, d: 2n };

const largest = (f) => decode(f.largest, f);
const lowest = (f) => (f.kind === "scale" ? decode(0n, f) : decode(placeCode(ends(f)[0], f, false), f));
const leastNormal = (f) => powerOf2(f.emin);
const leastNumber = (f) => powerOf2(f.subnormals ? f.emin - f.m : f.emin);

// The magnitude from which rounding to nearest overflows: half an ulp above the largest number.
function overflowThreshold(f, negative = false) {
  const end = absolute(negative && f.kind === "integer" ? lowest(f) : largest(f));
  return plus(end, times(ulp(end, f), HALF));
}

// Whether rounding to nearest overflows.
function overflows(number, f) {
  if (!isFinite(number)) return number.type === "inf";
  const negative = number.type === "finite" && number.negative;
  if (f.kind === "scale" && negative) return true;
  const side = compare(absolute(number), overflowThreshold(f, negative));
  if (side) return side > 0;
  return f.m === 0n || ((f.largest + BigInt(f.kind === "integer" && negative)) & 1n) === 1n;
}

// A number rounded to a format. `code` is null, and `refusal` says why, if the format has no code for it.
function encoded(number, f, rounding = "nearest", options = {}) {
  const found = { number, f, rounding, options, code: null, value: null, refusal: "", outcome: "none", error: null };
  try {
    found.code = encode(number, f, rounding, options);
  } catch (error) {
    return { ...found, refusal: error.message };
  }
  found.value = decode(found.code, f);
  if (isFinite(number) && isFinite(found.value)) found.error = minus(found.value, number);
  found.outcome = outcomeOf(found);
  return found;
}

function outcomeOf({ number, f, value, error }) {
  if (number.type === "nan") return "exact";
  if (!isFinite(value)) return value.type === "inf" && number.type === "inf" ? "exact" : "overflow";
  if (error && error.type === "zero") return "exact";
  if (overflows(number, f)) return "saturated";
  return value.type === "zero" ? "underflow" : "rounded";
}

const isSubnormal = (code, f) => classify(code, f) === "subnormal";

// The outcome as tables show it.
function outcomeText(found) {
  const { outcome, code, f, number } = found;
  if (code === null) return number.type === "nan" ? "no NaN" : "refused";
  if (isSubnormal(code, f) && outcome === "exact") return "exact subnormal";
  if (isSubnormal(code, f) && outcome === "rounded") return "subnormal";
  return outcome === "overflow" && !f.signed && number.negative ? "no sign" : outcome;
}

// The error in ulps, with its sign.
function ulpsText({ error, number, f }) {
  if (!error) return "";
  const ulps = over(error, ulp(number, f));
  return (ulps.type === "finite" && !ulps.negative ? "+" : "") + distance(ulps);
}

// The numbers of a format on both sides of a finite number.
function neighbours(number, f) {
  const [floor, ceiling] = [floorPlace(number, f), ceilingPlace(number, f)];
  const [low, high] = ends(f);
  const nearest = encode(number, f);
  const exact = floor === ceiling;
  const inside = (place) => place >= low && place <= high;
  const side = (place) => {
    if (exact && inside(place)) return nearest;
    if (!inside(place) && f.infinityCode === null && f.nanCode === null) return null;
    return placeCode(place, f, number.negative);
  };
  const [below, above] = [side(floor), side(ceiling)];
  const step = ulp(number, f);
  const halfway = (end, negative) => {
    const half = times(ulp(end, f), HALF);
    return negative ? minus(end, half) : plus(end, half);
  };
  let midpoint = null;
  if (!exact && inside(floor) && inside(ceiling)) midpoint = times(plus(decode(below, f), decode(above, f)), HALF);
  else if (!exact && floor === high) midpoint = halfway(largest(f), false);
  else if (!exact && f.signed) midpoint = halfway(lowest(f), true);
  const [previous, next] = [-1n, 1n].map((way) => nextCode(number, f, way));
  return { exact, below, above, midpoint, nearest, ulp: step, previous, next };
}

// The rule that decides rounding to nearest.
function ruleOf(number, f, around) {
  if (!around) return "special";
  if (around.exact) return "exact";
  const positive = number.type === "finite" && !number.negative;
  if (f.kind === "scale" && !positive) return number.type === "zero" ? "least" : "sign";
  if (overflows(number, f)) return "overflow";
  if (f.kind === "scale" && compare(number, leastNormal(f)) < 0) return "least";
  if (around.midpoint && compare(number, around.midpoint) === 0) {
    return f.m === 0n && compare(absolute(number), leastNormal(f)) >= 0 ? "tie_up" : "tie";
  }
  return "nearer";
}

// The values on both sides, as if the exponent had no upper limit.
function endsAround(number, f, step) {
  if (f.kind === "scale" && compare(number, leastNormal(f)) < 0) return [zero(), leastNormal(f)];
  const low = times(finite(false, 1n), step);
  const count = floor(over(number, step));
  return [times(fraction(count), low), times(fraction(count + 1n), low)];
}

// The possible results of stochastic rounding and their probabilities: toward zero first.
function chances(number, f, options) {
  const certain = () => [[finite(false, 1n), encoded(number, f, "nearest", options)]];
  if (!isFinite(number) || number.type === "zero") return certain();
  if (f.kind === "scale" && (number.negative || compare(number, leastNormal(f)) < 0)) return certain();
  const step = ulp(number, f);
  const whole = floor(over(absolute(number), step));
  const coarse = f.subnormals && f.emin > -126n && compare(absolute(number), leastNormal(f)) < 0;
  const steps = coarse ? 1n << 31n : 1n << 32n;
  const rest = minus(over(absolute(number), step), fraction(whole));
  const share = fraction(floor(times(rest, fraction(steps))), steps);
  const found = [whole, whole + 1n].map((count) => {
    const end = times(fraction(count), step);
    return encoded({ ...end, negative: number.negative }, f, "nearest", options);
  });
  if (found[0].code === found[1].code) return [[finite(false, 1n), found[0]]];
  const shares = [minus(finite(false, 1n), share), share];
  return shares.map((each, i) => [each, found[i]]).filter(([each]) => each.type !== "zero");
}

// ---------------------------------------------------------------------------------------------------------- sentences

const precision = (f) => (f.kind === "integer" ? f.m : f.m + 1n);
const maxDigits10 = (f) => (1n << precision(f)).toString().length + Number(f.kind !== "integer");

// A number with all its digits, or with enough of them to distinguish it from its neighbours.
function shown(number, f) {
  if (number.type !== "finite") return specialText(number);
  const whole = decimal(number);
  return whole !== null && whole.length <= 24 ? whole : `≈${rounded(number, maxDigits10(f) + 2)}`;
}

function power(number) {
  const whole = decimal(number);
  const digits = whole !== null && whole.length <= 24 ? `= ${whole}` : `≈ ${rounded(number, 4)}`;
  return `2^${floorLog2(number)} ${digits}`;
}

function stepWords(number, f, step) {
  const exact = absolute(number);
  const apart = `${power(step)} apart: 1 ulp`;
  if (f.kind === "integer") return `The numbers of ${f.name} are 1 apart: 1 ulp.`;
  if (f.kind === "scale") return `The numbers of ${f.name} are powers of two.`;
  if (compare(exact, leastNormal(f)) >= 0) {
    const low = floorLog2(exact);
    return `From 2^${low} to 2^${low + 1n} the numbers of ${f.name} are ${apart}.`;
  }
  const words = `Below 2^${f.emin} the numbers of ${f.name} are subnormal, all ${apart}.`;
  const left = floorLog2(exact) - floorLog2(step) + 1n;
  if (left < 1n) return `${words} This one is smaller than the least of them.`;
  return `${words} Of the ${precision(f)} bits of precision ${left} ${left === 1n ? "is" : "are"} left.`;
}

function whereWords(number, f, around) {
  const [low, high] = endsAround(number, f, around.ulp);
  const step = minus(high, low);
  const [below, above] = [minus(number, low), minus(high, number)].map((x) => distance(over(x, step)));
  return `The number is ${below} ulp above ${shown(low, f)} and ${above} ulp below ${shown(high, f)}.`;
}

function ruleWords(found, around, decided) {
  const { number, f } = found;
  const [low, high] = endsAround(number, f, around.ulp);
  const words = [`The number is exactly halfway between ${shown(low, f)} and ${shown(high, f)}.`];
  if (decided === "nearer") {
    words[0] = whereWords(number, f, around);
    words.push(`The nearer one is taken: ${shown(decode(around.nearest, f), f)}.`);
  } else if (decided === "tie") {
    const odd = [around.below, around.above].filter((code) => code !== null && code !== around.nearest);
    const ends = odd.map((code) => `, ${bitsText(code, f)} ends in 1`).join("");
    words.push(`Ties go to even: ${bitsText(around.nearest, f)} ends in 0 and is taken${ends}.`);
  } else {
    words.push("Ties go away from zero: with one significant bit none of them is even (IEEE 754-2019, 4.3.1).");
  }
  if (found.outcome === "underflow") {
    const half = times(leastNumber(f), HALF);
    words.push(`Whatever is no larger than ${power(half)}, half the least number, becomes zero.`);
  }
  return words;
}

function overflowWords(found) {
  const { number, f } = found;
  const { negative } = number;
  const threshold = overflowThreshold(f, negative);
  const last = absolute(negative && f.kind === "integer" ? lowest(f) : largest(f));
  const following = minus(plus(threshold, threshold), last);
  const withSign = (x) => ({ ...x, negative });
  let even = "exactly halfway rounds away too: the largest number's last bit is 1";
  if (!overflows(withSign(threshold), f)) {
    even = "exactly halfway still rounds to the largest number, whose last bit is 0";
  }
  if (f.m === 0n) even = "exactly halfway rounds away too: with one significant bit there is no even number";
  const [end, after, halfway] = [last, following, threshold].map((x) => shown(withSign(x), f));
  const where = compare(absolute(number), threshold) === 0 ? "at" : "beyond";
  return [
    `The ${negative ? "lowest" : "largest"} number of ${f.name} is ${end}. If the numbers went on, ${after} ` +
      `would come next; halfway lies ${halfway}.`,
    `The number lies ${where} it, so it overflows (${even}).`,
    insteadWords(found),
  ];
}

// What represents an overflow or an infinity.
function insteadWords({ number, f, code, value }) {
  if (code === null) return `${f.name} has no NaN, so that nothing can stand for it.`;
  if (value.type === "inf") return `Infinity is stored: ${codeText(code, f)}.`;
  if (value.type === "nan") {
    return `${f.infinityCode === null ? `${f.name} has no infinity: ` : ""}NaN is stored: ${codeText(code, f)}.`;
  }
  if (value.type === "zero" && number.type === "nan") return `Zero is stored: ${codeText(code, f)}.`;
  const neither = f.infinityCode === null && f.nanCode === null ? `${f.name} has neither infinity nor NaN: ` : "";
  return `${neither}the largest number is stored: ${shown(value, f)}, ${codeText(code, f)}.`;
}

// The explanation of rounding to nearest, as a list of one or two sentences each.
function words(found, around, decided) {
  const { number, f } = found;
  if (!around) return [`${number.type === "nan" ? "NaN" : "An infinity"} is not rounded.`, insteadWords(found)];
  if (decided === "exact") {
    const [previous, next] = [around.previous, around.next].map((code) => shown(decode(code, f), f));
    const where = `The next ones are ${previous} below and ${next} above.`;
    return [`It is a number of ${f.name}: nothing is rounded.`, where];
  }
  if (decided === "sign") {
    const special = found.code === null ? "nothing" : shown(found.value, f);
    return [`${f.name} has no sign, and ${special} stands for negative numbers.`];
  }
  if (decided === "least") {
    return [`${f.name} has no zero: everything below its least number, 2^${f.emin}, becomes that.`];
  }
  if (decided === "overflow") return overflowWords(found);
  return [stepWords(number, f, around.ulp), ...ruleWords(found, around, decided)];
}

// Why a finite number that is between two numbers of the format is none itself; "" where its size is the reason.
function obstacle(number, f) {
  const { n, d } = reduced(number);
  if (f.kind === "scale") return "";
  if (f.kind === "integer") return d === 1n ? "" : `The number is not an integer, and ${f.name} has integers only.`;
  if (d & (d - 1n)) {
    const text = `${number.negative ? "-" : ""}${n}/${d}`;
    const named = text.length <= 24 ? `The number is ${text} in lowest terms, and ${d} is not a power of two`
      : "In lowest terms its denominator is not a power of two";
    return `${named}: no binary format has it exactly.`;
  }
  const digits = n.toString(2).replace(/0+$/, "").length;
  return digits > precision(f) ? `The number has ${digits} significant bits, and ${f.name} has ${precision(f)}.` : "";
}

const TAKES = {
  toward_zero: "Rounding toward zero takes the one nearer to zero",
  up: "Rounding up takes the upper one",
  down: "Rounding down takes the lower one",
  odd: "Rounding to odd takes the one whose last bit is 1",
};

// The explanation for any rounding mode but "stochastic".
function reasons(found) {
  const { number, f, rounding, options, code } = found;
  const around = isFinite(number) ? neighbours(number, f) : null;
  const decided = ruleOf(number, f, around);
  const kept = { ...options, subnormals: true };
  const full = encoded(number, f, rounding, kept);
  const between = around && !["exact", "sign", "least", "overflow"].includes(decided);
  const said = [between ? obstacle(number, f) : "", ...wordsOfMode(full, around, decided)].filter(Boolean);
  if (full.code !== code) said.push(`Subnormal results are flushed to zero: ${codeText(code, f)} is stored.`);
  return said;
}

function wordsOfMode(found, around, decided) {
  const { number, f, rounding, options } = found;
  const tie = decided === "tie" || decided === "tie_up";
  const sideless = !around || ["exact", "sign", "least"].includes(decided);
  if (sideless || rounding === "nearest") return words(found, around, decided);
  const [low, high] = endsAround(number, f, around.ulp);
  const nearest = rounding === "nearest_away";
  const inner = number.negative ? high : low;
  const beyond = (x) => compare(absolute(x), absolute(number.negative ? lowest(f) : largest(f))) > 0;
  const start = () => [stepWords(number, f, around.ulp), whereWords(number, f, around)];
  const stops = rounding === "toward_zero" || rounding === "odd" || rounding === (number.negative ? "up" : "down");
  const outward = !nearest && !stops;
  const leaves = beyond(inner) || (beyond(number.negative ? low : high) && outward);
  if (nearest && (decided === "overflow" || (tie && beyond(number.negative ? low : high)))) {
    if (!tie || decided === "overflow") return overflowWords(found);
    const threshold = shown({ ...overflowThreshold(f, number.negative), negative: number.negative }, f);
    return [...start().slice(0, 1), `The number is exactly halfway to the number after the last one, ${threshold}.`,
      "Ties go away from zero, so it overflows.", insteadWords(found)];
  }
  if (nearest) {
    if (!tie) return words(found, around, decided);
    return [stepWords(number, f, around.ulp),
      `The number is exactly halfway between ${shown(low, f)} and ${shown(high, f)}.`,
      `Ties go away from zero: ${shown(found.value, f)}.`];
  }
  if (leaves) {
    const name = number.negative ? "lowest" : "largest";
    const end = shown(number.negative ? lowest(f) : largest(f), f);
    const said = [`The ${name} number of ${f.name} is ${end}, and the number lies beyond it.`];
    if (stops) {
      const why = rounding === "odd" ? "to odd" : rounding === "toward_zero" ? "toward zero" : rounding;
      return [...said, `Rounding ${why} does not overflow here: ${shown(found.value, f)} is stored, ` +
        `${codeText(found.code, f)}.`];
    }
    return [...said, `Rounding ${rounding} leads away from zero, so it overflows.`, insteadWords(found)];
  }
  if (rounding === "odd" && f.m === 0n && compare(absolute(number), leastNormal(f)) >= 0) {
    return [...start(), `With one significant bit, rounding to odd is rounding toward zero: ${shown(found.value, f)}.`];
  }
  if (rounding === "odd") {
    return [...start(), `${TAKES.odd}, ${bitsText(found.code, f)}: ${shown(found.value, f)}.`];
  }
  return [...start(), `${TAKES[rounding]}: ${shown(found.value, f)}.`];
}
