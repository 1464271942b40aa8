// The box beside the pointer, and what it says of a run: what it did at this step, and why.

import {cfName, element, last, short} from './page.js';

const NAMES = {
  'throughput/t_sys': 'samples (else steps) a second, T_sys',
  'throughput/t_comp': 'T_sys x gain (Goodput: gain to the power of policy/power), T_comp',
  'bytes/sent': 'bytes sent in the step',
  'bytes/wire_factor': 'wire factor',
  'time/step': 'seconds of the step',
  'cf/candidate': 'candidate CF',
  'cf/floor': 'floor CF',
  'gain/sent': 'gain',
  'gain/candidate': 'gain of the candidate CF',
  'gain/floor': 'gain of the floor CF',
};

export const Tip = {
  box: element('div', {className: 'tip', role: 'tooltip', hidden: true}),

  // lines: elements; none hide the box.
  show(lines, event) {
    this.box.hidden = !lines.length;
    if (this.box.hidden) return;
    if (!this.box.isConnected) document.body.append(this.box);
    this.box.replaceChildren(...lines);
    const {offsetWidth: width, offsetHeight: height} = this.box;
    const beside = event.clientX + 14 + width > innerWidth;
    this.box.style.left = `${Math.max(4, event.clientX + (beside ? -14 - width : 14))}px`;
    // It grows upwards, so that it does not lie over what comes below the row.
    const row = event.target.closest('.plot')?.getBoundingClientRect();
    const lowest = Math.min(row?.bottom ?? innerHeight, innerHeight - 4) - height;
    this.box.style.top = `${Math.max(4, Math.min(event.clientY + 14, lowest))}px`;
  },

  hide() {
    this.box.hidden = true;
  },
};

// What a row says at x; layer: the number of the one pointed at, or null.
export function tellStep(data, axis, x, layer, name) {
  const {numbers, switches, quality, layers} = data;
  const at = last(numbers[axis], x);
  const piece = last(data.band[axis], x);
  if (at < 0 || piece < 0 || x > data.band.end[axis]) return [];
  const step = axis === 'step' ? Math.floor(x) : numbers.step[at];
  const second = axis === 'second' ? x : numbers.second[at];
  const made = [
    element('div', {className: 'where'}, `${name}, step ${step}, ${short(second)} s`),
    element('div', {className: 'cf'}, cfName(data.band.cf[piece], data.rungs)),
  ];
  const newest = last(switches[axis], x);
  let move = newest; // the last one that changed the CF; what came after it were judgements
  while (move >= 0 && switches.before[move] === switches.cf[move]) move -= 1;
  if (move >= 0) made.push(reason(switches, move, 'since'));
  if (newest > move) made.push(reason(switches, newest, 'kept at'));
  if (layer !== null && layers) {
    const column = last(layers[axis], x);
    if (column >= 0) made.push(fact(layers.names[layer], cfName(layers.cf[layer][column] ?? 1, data.rungs)));
  }
  const values = Object.entries(numbers.values);
  for (const [tag, column] of values.sort(([a], [b]) => order(a) - order(b))) {
    made.push(fact(title(tag), short(column[at])));
  }
  const shown = quality ? last(quality[axis], x) : -1;
  if (shown >= 0) made.push(fact(quality.tag, short(quality.values[shown])));
  return made;
}

function reason(switches, i, word) {
  const others = switches.others[i];
  const when = others
    ? `${others + 1} switches close by, one at step ${switches.step[i]}`
    : `${word} step ${switches.step[i]}`;
  const text = `${when}: ${switches.reason[i] || 'no reason given'}`;
  return element('div', {className: 'reason'}, text);
}

function order(tag) {
  return ['time', 'bytes', 'gain', 'throughput', 'cf'].indexOf(tag.split('/')[0]);
}

function title(tag) {
  return NAMES[tag] ?? tag.replace('gain/', 'gain, ').replace('_', ' ');
}

export function fact(name, value) {
  return element('div', {className: 'fact'}, element('span', {}, name), element('b', {}, value));
}
