
-- sliding-log: (time, running total) entries in a ring buffer, so that entries never move and every lookup is a binary search.
-- Stored as a header '<ddddddddd' and up to `capacity` slots of '<I7I3'; the string is extended when a slot is first used. Totals
-- wrap around at 2^24; only their differences are meaningful. At most 2^24 - 1 units count at one time, more than any limit
-- allows; the oldest units of a larger debt are dropped.
--
-- In a state, entries are numbered from the oldest stored one: `first` to `length - 1`. They are fetched on demand into `times`
-- and `totals`; entries from `changed` on differ from the stored ones. No operation touches more than REFUND_REACH entries, or half
-- of the ring when a long one that has wrapped around grows.
define[SLIDING_LOG] = function()
  local self = {}

  local FETCH = 8
  local MAX_UNITS = LOG_WRAP - 1
  -- How many of the newest entries a refund by time can reach: it changes the totals of all later ones.
  local REFUND_REACH = 1000
  -- A ring of up to this many entries grows by a rewrite, which keeps its memory exact. A longer one grows in place.
  local MAX_REWRITE = 2000
  -- How many slots are moved by one command.
  local MOVED_SLOTS = 6500

  function self.load(raw, key)
    local state = { key = key, window = 0, last = 0, ttl_until = 0, base = 0, total = 0, oldest = 0, head = 0,
      length = 0, capacity = 0, first = 0, changed = 0, times = {}, totals = {}, exists = false,
      at = 0, live = 0, cutoff = false, used = 0 }
    if not raw then
      return state
    elseif #raw ~= LOG_HEADER_BYTES then
      return nil
    end
    local last, base, total, oldest, head, length, ttl_until, window, capacity = unpack_from(LOG_HEADER, raw)
    if not (are_stored(last, oldest, window, head, ttl_until) and are_stored(base, total, length, capacity, 0)
      and window > 0 and base < LOG_WRAP and total < LOG_WRAP and length <= capacity and head < capacity
      and capacity < MAX_LOG_SLOTS) then
      return nil
    end
    state.last, state.base, state.total, state.oldest, state.head, state.length, state.ttl_until, state.window,
      state.capacity = last, base, total, oldest, head, length, ttl_until, window, capacity
    state.exists, state.changed = true, length
    return state
  end

  -- Fetches the entry `index` and up to `most` of its successors into `times` and `totals`.
  local function fetch(state, index, most)
    local times, totals = state.times, state.totals
    if times[index] then
      return
    end
    local slot = (state.head + index) % state.capacity
    local count = min(most or FETCH, state.length - index, state.capacity - slot)
    local from = LOG_HEADER_BYTES + slot * SLOT_BYTES
    local raw = call('GETRANGE', state.key, from, from + count * SLOT_BYTES - 1)
    raw = raw .. rep('\0', count * SLOT_BYTES - #raw) -- a shortened string ends in empty slots
    local position = 1
    for i = index, index + count - 1 do
      local time, total
      time, total, position = unpack_from(SLOT, raw, position)
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
  local function charged_between(from, to)
    return (to - from) % LOG_WRAP
  end

  local function advanced(total, units)
    return (total + units) % LOG_WRAP
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
        is_before = charged_between(before, state.totals[probe]) < units
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
    state.used = charged_between(total_before(state, live), state.total)
  end

  function self.wait(state, _, max_used)
    local before = total_before(state, state.live)
    local last_to_expire = search(state, state.live, nil, before, state.used - max_used)
    return wait_until((state.times[last_to_expire] or state.last) + state.window, state.cutoff)
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
  end

  -- Removes the entries before `index`; the total before it becomes `base`.
  local function drop_until(state, index, base)
    state.base, state.first = base, index
    fetch(state, index)
    state.oldest = state.times[index]
  end

  -- Drops the oldest units of a debt that would exceed MAX_UNITS.
  local function drop_excess(state, excess)
    local index = search(state, state.first, nil, state.base, excess + 1)
    if index == state.length then
      clear(state)
    else
      drop_until(state, index, advanced(state.base, excess))
    end
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
    local added = min(units, MAX_UNITS)
    if state.cutoff or used == 0 then
      clear(state)
      state.window = limit.window
      added, used = min(used + added, MAX_UNITS), 0
    else
      if state.live > state.first then
        drop_until(state, state.live, total_before(state, state.live))
      end
      if used + added > MAX_UNITS then
        drop_excess(state, used + added - MAX_UNITS)
        used = MAX_UNITS - added
      end
    end
    state.live, state.cutoff, state.used = state.first, false, used + added
    state.total = advanced(state.total, added)
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
    local before, kept = total_before(state, state.live), state.used - units
    state.total = advanced(before, kept)
    if kept == 0 then
      state.length = state.live
      return
    end
    local newest = min(search(state, state.live, nil, before, kept), state.length - 1)
    fetch(state, newest)
    state.length, state.totals[newest], state.changed = newest + 1, state.total, min(state.changed, newest)
  end

  -- Refunds from the entry of one moment and adjusts the totals of all later ones.
  local function refund_at(state, units, time)
    local index = search(state, max(state.live, state.length - REFUND_REACH), time - 1)
    if index == state.length or state.times[index] ~= time then
      return false
    end
    local before = total_before(state, index)
    local held = charged_between(before, state.totals[index])
    local refunded = min(units, held)
    local target = index
    for i = index, state.length - 1 do
      fetch(state, i, REFUND_REACH)
      local remaining = charged_between(before, state.totals[i]) - refunded
      if i > index or refunded < held then
        state.times[target], state.totals[target] = state.times[i], advanced(before, remaining)
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
    local parts = {}
    for index = from, to - 1 do
      parts[#parts + 1] = pack(SLOT, state.times[index], state.totals[index])
    end
    return table.concat(parts)
  end

  local function packed_header(state)
    return pack(LOG_HEADER, state.last, state.base, state.total, state.oldest,
      (state.head + state.first) % state.capacity, state.length - state.first, state.ttl_until, state.window,
      state.capacity)
  end

  -- Returns the capacity of a ring that has to grow: 1.5 times the entries, but not more than the limit allows.
  local function grown_capacity(state, limit)
    local count = state.length - state.first
    return max(count, min(limit.amount, ceil(count * 1.5)))
  end

  -- Returns the stored entries that have not changed, in order.
  local function stored_entries(state)
    local count = min(state.changed, state.length) - state.first
    if count <= 0 or state.capacity == 0 then
      return ''
    end
    local ring = string.sub(call('GET', state.key), LOG_HEADER_BYTES + 1)
    local from = (state.head + state.first) % state.capacity
    local upto_end = min(count, state.capacity - from)
    return string.sub(ring, from * SLOT_BYTES + 1, (from + upto_end) * SLOT_BYTES)
      .. string.sub(ring, 1, (count - upto_end) * SLOT_BYTES)
  end

  -- Writes the whole log into a larger ring buffer.
  local function rewrite(key, state, limit, ttl)
    local entries = stored_entries(state) .. packed_entries(state, max(state.changed, state.first), state.length)
    state.capacity, state.head = grown_capacity(state, limit), -state.first
    call('SET', key, packed_header(state) .. entries .. rep('\0', state.capacity * SLOT_BYTES - #entries), 'PX', ttl)
  end

  -- Moves stored slots to higher ones, the last one first.
  local function move(key, from, to, count)
    while count > 0 do
      local piece = min(count, MOVED_SLOTS)
      count = count - piece
      local start = LOG_HEADER_BYTES + (from + count) * SLOT_BYTES
      local slots = call('GETRANGE', key, start, start + piece * SLOT_BYTES - 1)
      call('SETRANGE', key, LOG_HEADER_BYTES + (to + count) * SLOT_BYTES, slots)
    end
  end

  -- Enlarges a full ring. Its entries are in the slots from `head` to the end, then in those from 0 to `head`: the shorter part
  -- moves.
  local function grow(key, state, limit)
    local old, new = state.capacity, grown_capacity(state, limit)
    local head = (state.head + state.first) % old
    if head <= old / 2 then
      new = max(new, old + head)
      move(key, 0, old, head)
    else
      move(key, head, head + new - old, old - head)
      head = head + new - old
    end
    state.capacity, state.head = new, head - state.first
  end

  function self.own_limit(state, limit)
    local window = state.window > 0 and state.window or limit.window
    return window, 0, limit.units, limit.micros
  end

  function self.save(key, state, limit)
    local count = state.length - state.first
    if count == 0 and not state.exists then
      return -- charged and refunded in one batch
    end
    local is_rewritten = not state.exists or (count > state.capacity and count <= MAX_REWRITE)
    state.exists = not is_rewritten
    local ttl = next_ttl(state, limit, state.last + state.window)
    if is_rewritten then
      return rewrite(key, state, limit, ttl)
    elseif count > state.capacity then
      grow(key, state, limit)
    end
    local index = max(state.changed, state.first)
    while index < state.length do
      local slot = (state.head + index) % state.capacity
      local upto = min(state.length, index + state.capacity - slot)
      call('SETRANGE', key, LOG_HEADER_BYTES + slot * SLOT_BYTES, packed_entries(state, index, upto))
      index = upto
    end
    call('SETRANGE', key, '0', packed_header(state))
    if ttl then
      call('PEXPIRE', key, ttl)
    end
  end

  return self
end
