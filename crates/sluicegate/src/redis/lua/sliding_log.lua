
-- sliding-log: (time, running total) entries in a ring buffer, so that entries never move and every lookup is a binary search.
-- Stored as a header '<dddddddddd', then `capacity` slots of '<I7I3' or, once more than 2^24 - 1 units count at once, '<I7I7'.
-- Totals wrap around at 2^24 or 2^53; only their differences are meaningful.
--
-- In a state, entries are numbered from the oldest stored one: `first` to `length - 1`. They are fetched on demand into `times`
-- and `totals`; entries from `changed` on differ from the stored ones.
define[SLIDING_LOG] = function()
  local self = {}

  local FETCH = 8
  local SLOTS = { [3] = '<I7I3', [7] = '<I7I7' }
  local WRAP = { [3] = 2 ^ 24, [7] = 2 ^ 53 }

  function self.load(raw, key)
    local state = { key = key, window = 0, last = 0, ttl_until = 0, base = 0, total = 0, oldest = 0, head = 0,
      length = 0, capacity = 0, width = 3, first = 0, changed = 0, times = {}, totals = {}, exists = false,
      at = 0, live = 0, cutoff = false, used = 0 }
    if raw then
      state.exists = true
      state.last, state.base, state.total, state.oldest, state.head, state.length, state.ttl_until, state.window,
        state.capacity, state.width = unpack_from(LOG_HEADER, raw)
    end
    state.changed = state.length
    return state
  end

  -- Fetches the entry `index` and some of its successors into `times` and `totals`.
  local function fetch(state, index)
    local times, totals = state.times, state.totals
    if times[index] then
      return
    end
    local bytes = 7 + state.width
    local slot = (state.head + index) % state.capacity
    local count = min(FETCH, state.length - index, state.capacity - slot)
    local from = LOG_HEADER_BYTES + slot * bytes
    local raw = call('GETRANGE', state.key, from, from + count * bytes - 1)
    local format, position = SLOTS[state.width], 1
    for i = index, index + count - 1 do
      local time, total
      time, total, position = unpack_from(format, raw, position)
      if not times[i] then
        times[i], totals[i] = time, total
      end
    end
  end

  local function total_before(state, index)
    if index == state.first then
      return state.base
    end
    fetch(state, index - 1)
    return state.totals[index - 1]
  end

  -- Returns the units charged between two running totals.
  local function charged_between(state, from, to)
    return to >= from and to - from or to - from + WRAP[state.width]
  end

  local function advanced(state, total, units)
    local wrap = WRAP[state.width]
    return total >= wrap - units and total - (wrap - units) or total + units
  end

  -- Returns the first entry from `low` on that is later than `time` or, without a time, up to which at least `units` were charged
  -- since the total `before`; `length` if there is none. Searches near `low` first, because usually few entries have expired
  -- since the last request.
  local function search(state, low, time, before, units)
    local high, reach = state.length, 1
    while low < high do
      local probe = reach and min(low + reach, high) - 1 or floor((low + high) / 2)
      fetch(state, probe)
      local is_before
      if time then
        is_before = state.times[probe] <= time
      else
        is_before = charged_between(state, before, state.totals[probe]) < units
      end
      if is_before then
        low, reach = probe + 1, reach and reach * 2
      else
        high, reach = probe, nil
      end
    end
    return low
  end

  -- Finds the oldest entry that counts (`live`), the units that count, and when all of them stop counting because the limit has
  -- another window now (`cutoff`).
  function self.view(state, limit)
    local at = effective_time(state.last, limit.window)
    local cutoff = state.window ~= limit.window and state.last + limit.window
    if not at or (cutoff and at >= cutoff) then
      state.at, state.live, state.cutoff, state.used = at or now, state.length, false, 0
      return
    end
    local live = state.first
    if live < state.length and state.oldest <= at - state.window then
      live = search(state, live, at - state.window)
    end
    state.at, state.live, state.cutoff = at, live, cutoff
    state.used = charged_between(state, total_before(state, live), state.total)
  end

  function self.wait(state, _, max_used)
    local before = total_before(state, state.live)
    local last_to_expire = search(state, state.live, nil, before, state.used - max_used)
    return wait_until(state.times[last_to_expire] + state.window, state.cutoff)
  end

  function self.reset(state)
    if state.used == 0 then
      return 0, 0
    end
    return wait_until(state.last + state.window, state.cutoff), 0
  end

  -- Empties the log and keeps its ring buffer.
  local function clear(state)
    state.base, state.total, state.head, state.first, state.length, state.changed = 0, 0, 0, 0, 0, 0
    state.times, state.totals = {}, {}
    if state.width == 7 then
      state.width, state.capacity = 3, 0
    end
  end

  -- Converts every entry to a total of seven bytes. All of them are rewritten.
  local function widen(state)
    local total, before = 0, state.base
    for index = state.first, state.length - 1 do
      fetch(state, index)
      local after = state.totals[index]
      total = total + charged_between(state, before, after)
      before = after
      state.totals[index] = total
    end
    state.base, state.total, state.width, state.capacity, state.changed = 0, total, 7, 0, state.first
  end

  -- Updates the times of the oldest and the newest entry.
  local function update_times(state)
    state.last, state.oldest = 0, 0
    if state.first < state.length then
      fetch(state, state.length - 1)
      fetch(state, state.first)
      state.last, state.oldest = state.times[state.length - 1], state.times[state.first]
    end
  end

  function self.charge(state, limit, units)
    local at, used = state.at, state.used
    local added = min(units, MAX_EXACT - used)
    if state.cutoff or used == 0 then
      clear(state)
      state.window = limit.window
      added, used = used + added, 0
    elseif state.live > state.first then
      state.base, state.first = total_before(state, state.live), state.live
      fetch(state, state.first)
      state.oldest = state.times[state.first]
    end
    state.live, state.cutoff, state.used = state.first, false, used + added
    if added == 0 then
      return
    end
    if state.width == 3 and state.used >= WRAP[3] then
      widen(state)
    end
    state.total = advanced(state, state.total, added)
    local newest = state.length - 1
    -- a charge in the same microsecond, or one that does not fit into a log in debt, is added to the newest entry
    if newest < state.first or (state.last ~= at and newest - state.first + 1 < limit.amount) then
      newest = newest + 1
      state.length = newest + 1
    end
    state.times[newest], state.totals[newest], state.last = at, state.total, at
    if newest == state.first then
      state.oldest = at
    end
    state.changed = min(state.changed, newest)
  end

  local function refund_newest(state, units)
    while units > 0 do
      local newest = state.length - 1
      local before = total_before(state, newest)
      local held = charged_between(state, before, state.total)
      if held > units then
        fetch(state, newest)
        state.total = advanced(state, before, held - units)
        state.totals[newest] = state.total
        state.changed = min(state.changed, newest)
        return
      end
      units = units - held
      state.times[newest], state.totals[newest] = nil, nil
      state.length, state.total = newest, before
    end
  end

  -- Refunds from the entry of one moment and adjusts the totals of all later ones.
  local function refund_at(state, units, time)
    local index = search(state, state.live, time - 1)
    if index == state.length or state.times[index] ~= time then
      return false
    end
    local before = total_before(state, index)
    local held = charged_between(state, before, state.totals[index])
    local refunded = min(units, held)
    local target = index
    for i = index, state.length - 1 do
      fetch(state, i)
      local remaining = charged_between(state, before, state.totals[i]) - refunded
      if i > index or refunded < held then
        state.times[target], state.totals[target] = state.times[i], advanced(state, before, remaining)
        target = target + 1
      end
    end
    for i = target, state.length - 1 do
      state.times[i], state.totals[i] = nil, nil
    end
    state.length, state.changed = target, min(state.changed, index)
    state.total = total_before(state, target)
    return true
  end

  function self.refund(state, limit, units, time)
    if state.used == 0 or units == 0 then
      return false
    end
    if time < 0 then
      refund_newest(state, min(units, state.used))
    elseif not refund_at(state, units, time) then
      return false
    end
    update_times(state)
    self.view(state, limit)
    return true
  end

  local function packed_entries(state, from, to)
    local format, parts = SLOTS[state.width], {}
    for index = from, to - 1 do
      parts[#parts + 1] = pack(format, state.times[index], state.totals[index])
    end
    return table.concat(parts)
  end

  local function packed_header(state)
    return pack(LOG_HEADER, state.last, state.base, state.total, state.oldest,
      (state.head + state.first) % max(state.capacity, 1), state.length - state.first, state.ttl_until, state.window,
      state.capacity, state.width)
  end

  -- Returns the stored entries that have not changed, in order.
  local function stored_entries(state)
    local count = min(state.changed, state.length) - state.first
    if count <= 0 or state.capacity == 0 then
      return ''
    end
    local bytes = 7 + state.width
    local ring = string.sub(call('GET', state.key), LOG_HEADER_BYTES + 1)
    local from = (state.head + state.first) % state.capacity
    local upto_end = min(count, state.capacity - from)
    return string.sub(ring, from * bytes + 1, (from + upto_end) * bytes)
      .. string.sub(ring, 1, (count - upto_end) * bytes)
  end

  -- Writes the whole log into a larger ring buffer: 1.5 times the entries, but not more than the limit allows.
  local function rewrite(key, state, limit, ttl)
    local count = state.length - state.first
    local entries = stored_entries(state) .. packed_entries(state, max(state.changed, state.first), state.length)
    state.capacity = max(count, min(limit.amount, ceil(count * 1.5)))
    state.head = -state.first
    local padding = string.rep('\0', (state.capacity - count) * (7 + state.width))
    call('SET', key, packed_header(state) .. entries .. padding, 'PX', ttl)
  end

  function self.save(key, state, limit)
    local grows = not state.exists or state.length - state.first > state.capacity
    state.exists = not grows
    local ttl = next_ttl(state, limit, state.last + state.window)
    if grows then
      return rewrite(key, state, limit, ttl)
    end
    local bytes, index = 7 + state.width, max(state.changed, state.first)
    while index < state.length do
      local slot = (state.head + index) % state.capacity
      local upto = min(state.length, index + state.capacity - slot)
      call('SETRANGE', key, LOG_HEADER_BYTES + slot * bytes, packed_entries(state, index, upto))
      index = upto
    end
    call('SETRANGE', key, '0', packed_header(state))
    if ttl then
      call('PEXPIRE', key, ttl)
    end
  end

  return self
end
