'use strict';
// Sorts the stores by the answers. All that it says of a store comes from the facts of the comparison.
(() => {
  const stores = JSON.parse(document.getElementById('facts').textContent);
  const form = document.getElementById('answers');
  const kinds = { fifo: 'strict order of arrival', shared: 'readers and writers', permits: 'semaphores',
    resume: 'leases that outlive their process', keeps: 'jobs once per window',
    downgrades: 'writers that become readers without a gap' };
  const inWords = (micros) => micros >= 1000 ? `${+(micros / 1000).toPrecision(3)} ms` : `${+micros.toPrecision(3)} µs`;

  // What speaks for and against a store.
  const judge = (store, answers) => {
    const pros = [], cons = [], unknown = [];
    if (store.overlaps) cons.push(`let two in at once here, ${store.overlaps} times`);
    if (store.failedCases) cons.push(`failed ${store.failedCases} compliance cases here`);
    if (answers.get('where') !== 'one' && store.inProcess) cons.push('only one process can use its locks');
    if (answers.get('fences') === 'yes') {
      if (store.fencing === 'Strict' || store.fencing === 'Hybrid') pros.push('its fences let the resource refuse a late holder');
      else cons.push('its fences may start again lower when data is lost, so the resource can let a late holder pass');
    }
    if (answers.get('loss') === 'yes') {
      if (store.keepsAfterLoss) pros.push(`when a server loses data: ${store.afterLoss}`);
      else cons.push(`when a server loses data: ${store.afterLoss}`);
    }
    const limit = Number(answers.get('time'));
    // What was not measured speaks neither for a store nor against it.
    if (store.pair === null) { if (limit) unknown.push('its acquire and release were not measured here'); }
    else if (limit && store.pair > limit) cons.push(`acquire and release took ${inWords(store.pair)} here`);
    else pros.push(`acquire and release took ${inWords(store.pair)} here`);
    for (const kind of answers.getAll('kind')) (store[kind] ? pros : cons).push(`${store[kind] ? 'has' : 'does not have'} ${kinds[kind]}`);
    // Behind a + is how its servers stand together, as in redis+sentinel.
    const runs = answers.getAll('run').includes(store.scheme.split('+')[0]);
    if (runs) pros.push('you run it already');
    return { store, pros, cons, unknown, runs };
  };

  const item = (text, className) => {
    const li = document.createElement('li');
    li.textContent = text;
    if (className) li.className = className;
    return li;
  };

  const show = () => {
    const answers = new URLSearchParams(new FormData(form));
    const judged = stores.map((store) => judge(store, answers));
    // Nor is a store that was measured better than one that was not.
    const timed = stores.every((store) => store.pair !== null);
    judged.sort((a, b) => a.cons.length - b.cons.length || b.runs - a.runs || (timed ? a.store.pair - b.store.pair : 0));
    document.getElementById('answer').replaceChildren(...judged.map(({ store, pros, cons, unknown }) => {
      const li = item('', cons.length ? 'against' : '');
      const name = document.createElement('strong');
      name.textContent = store.name;
      const reasons = document.createElement('ul');
      reasons.append(...cons.map((text) => item(text, 'no')), ...unknown.map((text) => item(text)), ...pros.map((text) => item(text)));
      li.append(name, reasons);
      return li;
    }));
    document.getElementById('note').textContent = answers.get('fences') === 'yes' ? ''
      : 'Where the resource checks no fences, a holder that was frozen for longer than its lease can write beside the next one, whichever store it is.';
    return answers;
  };

  // The answers are in the address, where they can be passed on.
  const read = () => {
    if (!location.hash.includes('=')) return;
    const answers = new URLSearchParams(location.hash.slice(1));
    for (const input of form.elements) {
      if (input.type === 'checkbox') input.checked = answers.getAll(input.name).includes(input.value);
      if (input.type === 'radio' && answers.has(input.name)) input.checked = answers.get(input.name) === input.value;
    }
  };
  form.addEventListener('change', () => history.replaceState(null, '', `#${show()}`));
  form.addEventListener('submit', (event) => event.preventDefault());
  addEventListener('hashchange', () => { read(); show(); });
  read();
  show();
})();
