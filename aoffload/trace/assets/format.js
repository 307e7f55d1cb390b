"use strict";
// Formats of times, durations, counts and sizes.

function threeDigits(value) {
  return value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

function durationText(seconds) {
  if (seconds >= 119.5) {
    return `${Math.floor((seconds + 0.5) / 60)} min ${String(Math.floor(seconds + 0.5) % 60).padStart(2, "0")} s`;
  }
  if (seconds >= 0.9995) return `${threeDigits(seconds)} s`;
  if (seconds >= 0.0009995) return `${threeDigits(seconds * 1e3)} ms`;
  return `${threeDigits(seconds * 1e6)} \u00b5s`;
}

function timeText(atS) {
  return new Date(Math.round(atS * 1000)).toISOString().slice(11, 23);
}

function sizeText(numBytes) {
  if (numBytes < 999.5) return `${numBytes.toFixed(0)} B`;
  for (const unit of ["kB", "MB", "GB"]) {
    numBytes /= 1000;
    if (numBytes < 999.5) return `${threeDigits(numBytes)} ${unit}`;
  }
  return `${threeDigits(numBytes / 1000)} TB`;
}

function countText(number, noun) {
  return `${numberText(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function numberText(number) {
  return number.toLocaleString("en");
}

// Durations of one column: the unit stands in its header. A microsecond can be read, or a millisecond where some take long.
function durationColumn(seconds) {
  const isLong = seconds.some((each) => each >= 10);
  const digits = { minimumFractionDigits: 3, maximumFractionDigits: 3 };
  return { unit: isLong ? "s" : "ms", texts: seconds.map((each) => (isLong ? each : each * 1e3).toLocaleString("en", digits)) };
}

// The smallest round number that is at least as large.
function roundUp(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return power * [1, 2, 4, 5, 8, 10].find((factor) => factor * power >= number);
}

// What all names begin with, up to a character that separates parts of a name.
function sharedPrefix(names) {
  let shared = names.length > 1 ? names[0] : "";
  for (const name of names) while (!name.startsWith(shared)) shared = shared.slice(0, -1);
  return shared.match(/^.*[-_:./]/)?.[0] ?? "";
}

// The step between two marks of the axis: a round number of at least that many seconds.
function roundStep(seconds) {
  const power = 10 ** Math.floor(Math.log10(seconds));
  for (const factor of [1, 2, 5]) if (factor * power >= seconds) return clockStep(factor * power);
  return clockStep(10 * power);
}

// Over a minute, decimal steps are not round.
function clockStep(seconds) {
  if (seconds <= 30) return seconds;
  for (const step of [60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400]) if (step >= seconds) return step;
  return Math.ceil(seconds / 86400) * 86400;
}
