// What is drawn: each function fills one canvas. scale: {axis, domain, left, top}: x goes from the
// domain to what is right of `left` pixels, which hold names; `top` is the largest CF of the axis.

import {cfName, cssColour, short} from './page.js';
import {colour} from './colours.js';

export const LAYER_HEIGHT = 14; // pixels
export const BAND = 92; // pixels, at least
const MARKS = 11; // pixels above the CFs
const THICK = 6; // pixels of the line of CFs
export const LABEL = 11; // pixels between two labels
const LABELS = 24; // of one row, about
const FONT = '11px sans-serif';

// The canvas's pen, in CSS pixels, and a function from steps or seconds to pixels.
export function pen(canvas, {domain: [low, high], left}) {
  const {clientWidth: width, clientHeight: height} = canvas;
  const dots = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * dots);
  canvas.height = Math.round(height * dots);
  const context = canvas.getContext('2d');
  context.scale(dots, dots);
  context.font = FONT;
  const x = (value) => left + ((value - low) / (high - low)) * (width - left);
  return {context, width, height, x};
}

// From here on nothing is drawn over the names.
export function clip(context, left, width, height) {
  context.beginPath();
  context.rect(left, 0, width - left, height);
  context.clip();
}

// A name, or a number of the vertical axis with its line.
export function sideLabel(context, text, left, y, width = 0) {
  context.textAlign = 'right';
  context.textBaseline = 'middle';
  context.fillStyle = cssColour('--faint');
  context.fillText(text, left - 6, y);
  if (width) {
    context.fillStyle = cssColour('--edge');
    context.fillRect(left, Math.round(y), width - left, 1);
  }
}

// Pieces that hold their value until the next one, as (left, right, CF) in pixels.
function pieces(x, starts, end, cfs, each) {
  const dots = window.devicePixelRatio || 1;
  const dot = (value) => Math.round(x(value) * dots) / dots; // no seams between equal colours
  starts.forEach((start, i) => {
    const left = dot(start);
    const right = dot(i + 1 < starts.length ? starts[i + 1] : end);
    each(left, Math.max(right, left + 1 / dots), cfs[i]);
  });
}

// The CFs as a stepped line in their colours on a log axis: an area below it would have no meaning.
export function drawBand(canvas, data, scale) {
  const {context, width, height, x} = pen(canvas, scale);
  const {band, switches} = data;
  const bottom = height - THICK;
  const y = (cf) => bottom - (Math.log(cf) / Math.log(scale.top)) * (bottom - MARKS - 4);
  const named = labelled(band.cf);
  const places = apart(named.map(y), 6, height - 6);
  named.forEach((cf, i) => {
    context.fillStyle = cssColour('--edge');
    context.fillRect(scale.left, Math.round(y(cf)), width - scale.left, 1);
    sideLabel(context, cfName(cf, data.rungs), scale.left, places[i]);
  });
  clip(context, scale.left, width, height);
  const [corners, bars] = [[], []];
  pieces(x, band[scale.axis], band.end[scale.axis], band.cf, (left, right, cf) => {
    corners.push([left, y(cf)], [right, y(cf)]);
    bars.push([left, Math.round(y(cf) - THICK / 2), right - left, colour(cf)]);
  });
  context.strokeStyle = cssColour('--faint');
  context.lineWidth = corners.length > width ? 0.5 : 1;
  path(context, corners);
  for (const [left, top, long, fill] of bars) {
    context.fillStyle = fill;
    context.fillRect(left, top, long, THICK);
  }
  context.strokeStyle = context.fillStyle = cssColour('--ink');
  switches[scale.axis].forEach((at, i) => {
    mark(context, x(at), switches.before[i] !== switches.cf[i]);
  });
}

// Dense and all CFs that were sent, ascending; of a great many, some evenly from all.
export function labelled(cfs) {
  const sent = [...new Set([1, ...cfs])].sort((a, b) => a - b);
  const every = Math.ceil(sent.length / LABELS);
  return sent.filter((_, i) => i % every === 0 || i === sent.length - 1);
}

// Where labels go that belong at `wanted` (descending), so that none covers another.
function apart(wanted, top, bottom) {
  const each = Math.min(LABEL, (bottom - top) / Math.max(1, wanted.length - 1));
  const places = [];
  for (const y of wanted) places.push(Math.min(y, bottom, (places.at(-1) ?? Infinity) - each));
  let below = top;
  for (let i = places.length - 1; i >= 0; i -= 1) {
    places[i] = Math.max(places[i], below);
    below = places[i] + each;
  }
  return places;
}

// A line through points; null is a gap in it.
export function path(context, points) {
  context.beginPath();
  points.forEach((point, i) => {
    if (point && points[i - 1]) context.lineTo(...point);
    else if (point) context.moveTo(...point);
  });
  context.stroke();
}

// A full triangle for a switch, an empty one for a judgement.
function mark(context, x, moves) {
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x - 4, 1);
  context.lineTo(x + 4, 1);
  context.lineTo(x, MARKS - 2);
  context.closePath();
  if (moves) context.fill();
  else context.stroke();
}

export function drawLayers(canvas, layers, scale) {
  const {context, width, height, x} = pen(canvas, scale);
  const each = height / layers.names.length;
  const every = Math.ceil(11 / each); // names that have room
  layers.names.forEach((name, row) => {
    if (row % every) return;
    sideLabel(context, fitting(context, name, scale.left - 8), scale.left, (row + 0.5) * each);
  });
  clip(context, scale.left, width, height);
  layers.cf.forEach((cfs, row) => {
    pieces(x, layers[scale.axis], layers.end[scale.axis], cfs, (left, right, cf) => {
      context.fillStyle = colour(cf);
      context.fillRect(left, row * each, right - left, each - (each > 6 ? 1 : 0));
    });
  });
}

// The end of a name tells more than its beginning: "...layers.0.weight".
function fitting(context, name, room) {
  let shown = name;
  while (shown.length > 4 && context.measureText(shown).width > room) {
    shown = `…${shown.slice(shown[0] === '…' ? 2 : 1)}`;
  }
  return shown;
}

// range: least and largest value of the axis. dense: the quality of a dense run; null: there is none.
export function drawQuality(canvas, quality, scale, [low, high], dense) {
  const {context, width, height, x} = pen(canvas, scale);
  const y = (value) => 9 + (1 - (value - low) / (high - low || 1)) * (height - 16);
  for (const value of high > low ? [low, high] : [low]) {
    sideLabel(context, short(value), scale.left, y(value), width);
  }
  sideLabel(context, fitting(context, quality.tag, scale.left - 8), scale.left, height / 2);
  clip(context, scale.left, width, height);
  context.lineWidth = 1.5;
  const through = ({values, [scale.axis]: at}) => values
    .map((value, i) => [x(at[i]), value])
    .filter(([, value]) => value !== null)
    .map(([place, value]) => [place, y(value)]);
  if (dense) {
    context.strokeStyle = colour(1);
    path(context, through(dense));
  }
  context.strokeStyle = context.fillStyle = cssColour('--line');
  const points = through(quality);
  path(context, points);
  if (points.length < 60) points.forEach(([at, height]) => dot(context, at, height));
}

export function dot(context, x, y, radius = 2.5) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

// Round numbers from low to high, about `room` of them.
export function ticks(low, high, room) {
  const raw = (high - low) / Math.max(1, room) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const every = power * [1, 2, 5, 10].find((factor) => factor * power >= 0.999 * raw);
  const first = Math.ceil(low / every - 1e-6);
  const count = Math.floor(high / every + 1e-6) - first + 1;
  return Array.from({length: Math.max(0, count)}, (_, i) => (first + i) * every);
}

export function drawAxis(canvas, scale, at = null) {
  const {context, width, x} = pen(canvas, scale);
  const [low, high] = scale.domain;
  context.textBaseline = 'top';
  context.fillStyle = cssColour('--faint');
  context.textAlign = 'right';
  context.fillText(scale.title ?? (scale.axis === 'second' ? 'seconds' : 'step'), scale.left - 6, 5);
  for (const value of at ?? ticks(low, high, Math.max(2, Math.floor((width - scale.left) / 90)))) {
    const place = x(value);
    context.fillRect(place, 0, 1, 4);
    context.textAlign = place < scale.left + 12 ? 'left' : place > width - 12 ? 'right' : 'center';
    context.fillText(scale.text ? scale.text(value) : short(value), place, 5);
  }
}
