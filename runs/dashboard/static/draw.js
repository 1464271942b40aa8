// What is drawn: each function fills one canvas, x from the scale's domain to its full width.

import {cssColour, short} from './page.js';
import {colour} from './colours.js';

export const LAYER_HEIGHT = 14; // pixels
const MARKS = 11; // pixels above the band

// The canvas's pen, in CSS pixels, and a function from steps or seconds to pixels.
function pen(canvas, {domain: [low, high]}) {
  const {clientWidth: width, clientHeight: height} = canvas;
  const dots = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * dots);
  canvas.height = Math.round(height * dots);
  const context = canvas.getContext('2d');
  context.scale(dots, dots);
  return {context, width, height, x: (value) => ((value - low) / (high - low)) * width};
}

// Pieces that hold their colour until the next one.
function pieces(context, x, starts, end, cfs, top, height, most) {
  const dots = window.devicePixelRatio || 1;
  const dot = (value) => Math.round(x(value) * dots) / dots; // no seams between equal colours
  starts.forEach((start, i) => {
    const left = dot(start);
    const right = dot(i + 1 < starts.length ? starts[i + 1] : end);
    context.fillStyle = colour(cfs[i], most);
    context.fillRect(left, top, Math.max(right - left, 1 / dots), height);
  });
}

export function drawBand(canvas, data, scale) {
  const {context, width, height, x} = pen(canvas, scale);
  const {band, switches} = data;
  pieces(context, x, band[scale.axis], band.end[scale.axis], band.cf, MARKS, height - MARKS,
    scale.most);
  context.fillStyle = context.strokeStyle = cssColour('--ink');
  const bottom = switches.step.length * 10 > width ? MARKS : height; // many lines would hide colours
  switches[scale.axis].forEach((at, i) => {
    mark(context, x(at), switches.before[i] !== switches.cf[i], bottom);
  });
}

// A full triangle for a switch, with a line to the bottom; an empty one for a judgement.
function mark(context, x, moves, bottom) {
  context.beginPath();
  context.moveTo(x - 4, 1);
  context.lineTo(x + 4, 1);
  context.lineTo(x, MARKS - 2);
  context.closePath();
  if (!moves) {
    context.stroke();
    return;
  }
  context.fill();
  context.fillRect(x - 0.5, MARKS - 2, 1, bottom - MARKS + 2);
}

export function drawLayers(canvas, layers, scale) {
  const {context, height, x} = pen(canvas, scale);
  const each = height / layers.names.length;
  const gap = each > 6 ? 1 : 0;
  layers.cf.forEach((cfs, row) => {
    pieces(context, x, layers[scale.axis], layers.end[scale.axis], cfs, row * each, each - gap,
      scale.most);
  });
  if (each < 10) return;
  context.font = `${Math.min(11, each - 3)}px sans-serif`;
  context.textBaseline = 'middle';
  layers.names.forEach((name, row) => label(context, name, 4, (row + 0.5) * each));
}

// Text that can be read on any colour.
function label(context, text, x, y) {
  context.lineWidth = 3;
  context.lineJoin = 'round';
  context.strokeStyle = cssColour('--page');
  context.strokeText(text, x, y);
  context.fillStyle = cssColour('--ink');
  context.fillText(text, x, y);
}

export function drawQuality(canvas, quality, scale) {
  const {context, width, height, x} = pen(canvas, scale);
  const values = quality.values.filter((value) => value !== null);
  const low = Math.min(...values);
  const high = Math.max(...values);
  const y = (value) => 4 + (1 - (value - low) / (high - low || 1)) * (height - 8);
  context.strokeStyle = context.fillStyle = cssColour('--line');
  context.lineWidth = 1.5;
  context.beginPath();
  quality.values.forEach((value, i) => {
    if (value !== null) context.lineTo(x(quality[scale.axis][i]), y(value));
  });
  context.stroke();
  if (values.length < 30) {
    quality.values.forEach((value, i) => {
      if (value !== null) context.fillRect(x(quality[scale.axis][i]) - 2, y(value) - 2, 4, 4);
    });
  }
  context.font = '11px sans-serif';
  context.textAlign = 'right';
  context.textBaseline = 'top';
  label(context, short(high), width - 4, 2);
  context.textBaseline = 'bottom';
  label(context, short(low), width - 4, height - 2);
  context.textAlign = 'left';
  context.textBaseline = 'top';
  label(context, quality.tag, 4, 2);
}

export function drawAxis(canvas, scale) {
  const {context, width, x} = pen(canvas, scale);
  const [low, high] = scale.domain;
  const room = Math.max(2, Math.floor(width / 90));
  const raw = (high - low) / room;
  const power = 10 ** Math.floor(Math.log10(raw));
  const every = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  context.font = '11px sans-serif';
  context.textBaseline = 'top';
  context.fillStyle = cssColour('--faint');
  for (let i = Math.ceil(low / every); i * every <= high; i += 1) {
    const at = x(i * every);
    context.fillRect(at, 0, 1, 4);
    context.textAlign = at < 12 ? 'left' : at > width - 12 ? 'right' : 'center';
    context.fillText(short(i * every) + (scale.axis === 'second' ? ' s' : ''), at, 5);
  }
}
