// What a run did at the step under the pointer, and why.

import {cfName, element, short} from './page.js';

const NAMES = {
  'throughput/t_sys': 'T_sys',
  'throughput/t_comp': 'T_comp',
  'bytes/sent': 'bytes sent',
  'bytes/wire_factor': 'wire factor',
  'time/step': 'step time, s',
  'cf/candidate': 'candidate',
  'cf/floor': 'floor',
  'gain/sent': 'gain',
};

// Index of the last of ascending values that is at most x; -1 if there is none.
export function last(values, x) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

export const Tip = {
  box: element('div', {className: 'tip', role: 'tooltip', hidden: true}),

  show(row, x, layer, event) {
    const {data, view: {axis}} = row;
    const at = data ? last(data.numbers[axis], x) : -1;
    const piece = data ? last(data.band[axis], x) : -1;
    if (at < 0 || piece < 0 || x > data.band.end[axis]) {
      this.hide();
      return;
    }
    if (!this.box.isConnected) document.body.append(this.box);
    this.box.replaceChildren(...lines(data, axis, x, at, piece, layer, row.name));
    this.box.hidden = false;
    const {offsetWidth: width, offsetHeight: height} = this.box;
    const beside = event.clientX + 14 + width > innerWidth;
    this.box.style.left = `${Math.max(4, event.clientX + (beside ? -14 - width : 14))}px`;
    this.box.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4))}px`;
  },

  hide() {
    this.box.hidden = true;
  },
};

function lines(data, axis, x, at, piece, layer, name) {
  const {numbers, switches, quality, layers} = data;
  const step = axis === 'step' ? Math.floor(x) : numbers.step[at];
  const second = axis === 'second' ? x : numbers.second[at];
  const made = [
    element('div', {className: 'where'}, `${name}, step ${step}, ${short(second)} s`),
    element('div', {className: 'cf'}, cfName(data.band.cf[piece])),
  ];
  const newest = last(switches[axis], x);
  let move = newest; // the last one that changed the CF; what came after it were judgements
  while (move >= 0 && switches.before[move] === switches.cf[move]) move -= 1;
  if (move >= 0) made.push(reason(switches, move, 'since'));
  if (newest > move) made.push(reason(switches, newest, 'judged at'));
  if (layer !== null && layers) {
    const column = last(layers[axis], x);
    if (column >= 0) made.push(fact(layers.names[layer], cfName(layers.cf[layer][column] ?? 1)));
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
  return ['gain', 'throughput', 'bytes', 'time', 'cf'].indexOf(tag.split('/')[0]);
}

function title(tag) {
  return NAMES[tag] ?? tag.replace('gain/', 'gain, ').replace('_', ' ');
}

function fact(name, value) {
  return element('div', {className: 'fact'}, element('span', {}, name), element('b', {}, value));
}
