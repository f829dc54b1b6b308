
-- sliding-log: (time, running total) entries in a ring, so that nothing has to move and every question is a
-- binary search. The key holds a header '<ddddddddd', then `capacity` slots of '<I7I5' or, once
-- more than 2^40 - 1 units count at once, '<I7I7'. Totals wrap round at 2^40 or 2^53; only differences count.
--
-- In a state, entries are numbered from the oldest one stored: `first` to `length - 1`. They are fetched as
-- needed and kept in `times` and `totals`; those from `changed` on differ from what is stored.
local sliding_log = {}

local LOG_HEADER = '<ddddddddd'
local LOG_HEADER_BYTES = 72
local LOG_FETCH = 8
local LOG_SLOTS = { [5] = '<I7I5', [7] = '<I7I7' }
local LOG_WRAP = { [5] = 2 ^ 40, [7] = 2 ^ 53 }

function sliding_log.load(raw, key)
  local state = { key = key, last = 0, window = 0, ttl_until = 0, base = 0, total = 0, head = 0, length = 0,
    capacity = 0, width = 5, first = 0, times = {}, totals = {} }
  if raw then
    state.exists = true
    state.window, state.last, state.ttl_until, state.base, state.total, state.head, state.length,
      state.capacity, state.width = unpack_from(LOG_HEADER, raw)
  end
  state.changed = state.length
  return state
end

-- Makes sure that the entry `index` is in `times` and `totals`, and some of its successors with it.
local function fetch(state, index)
  if state.times[index] then
    return
  end
  local bytes = 7 + state.width
  local slot = (state.head + index) % state.capacity
  local count = min(LOG_FETCH, state.length - index, state.capacity - slot)
  local from = LOG_HEADER_BYTES + slot * bytes
  local raw = redis.call('GETRANGE', state.key, from, from + count * bytes - 1)
  local format, position = LOG_SLOTS[state.width], 1
  for i = index, index + count - 1 do
    local time, total
    time, total, position = unpack_from(format, raw, position)
    if not state.times[i] then
      state.times[i], state.totals[i] = time, total
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

-- How much was charged from the running total `from` to the running total `to`.
local function charged_between(state, from, to)
  return to >= from and to - from or to - from + LOG_WRAP[state.width]
end

local function advanced(state, total, units)
  local wrap = LOG_WRAP[state.width]
  return total >= wrap - units and total - (wrap - units) or total + units
end

-- The first entry from `low` on for which `passed` is false; `length` when there is none. Looks near `low`
-- first: as a rule, few entries have expired since the last request.
local function search(state, low, passed)
  local reach, high = 1, state.length
  while low < high do
    local probe = min(low + reach, high) - 1
    fetch(state, probe)
    if passed(probe) then
      low, reach = probe + 1, reach * 2
    else
      high = probe
      break
    end
  end
  while low < high do
    local middle = floor((low + high) / 2)
    fetch(state, middle)
    if passed(middle) then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- The key's own time, the oldest entry that counts, how much counts, and when all of it stops counting
-- because the limit has another window now.
local function sliding_log_view(state, limit)
  local at = key_time(state.last, limit.window)
  if not at then
    return now, state.length, 0, nil
  end
  local cut = state.window ~= limit.window and state.last + limit.window
  if cut and at >= cut then
    return at, state.length, 0, nil
  end
  local expired = at - state.window
  local first = search(state, state.first, function(index)
    return state.times[index] <= expired
  end)
  return at, first, charged_between(state, total_before(state, first), state.total), cut
end

function sliding_log.used(state, limit)
  local _, _, used = sliding_log_view(state, limit)
  return used
end

function sliding_log.wait(state, limit, room)
  local _, first, used, cut = sliding_log_view(state, limit)
  local before, must_go = total_before(state, first), used - room
  local last_to_go = search(state, first, function(index)
    return charged_between(state, before, state.totals[index]) < must_go
  end)
  return before_cut(state.times[last_to_go] + state.window, cut)
end

function sliding_log.reset(state, limit)
  local _, _, used, cut = sliding_log_view(state, limit)
  if used == 0 then
    return 0, 0
  end
  return before_cut(state.last + state.window, cut), 0
end

-- Starts an empty log, in the ring that is there.
local function clear(state)
  state.base, state.total, state.head, state.first, state.length, state.changed = 0, 0, 0, 0, 0, 0
  state.times, state.totals = {}, {}
  if state.width == 7 then
    state.width, state.capacity = 5, 0
  end
end

-- Fetches every entry and gives it a total of seven bytes; all of them are written anew.
local function widen(state)
  local total = 0
  local before = state.base
  for index = state.first, state.length - 1 do
    fetch(state, index)
    local after = state.totals[index]
    total = total + charged_between(state, before, after)
    before = after
    state.totals[index] = total
  end
  state.base, state.total, state.width, state.capacity, state.changed = 0, total, 7, 0, state.first
end

function sliding_log.charge(state, limit, units)
  local at, first, used, cut = sliding_log_view(state, limit)
  units = min(units, MAX_EXACT - used)
  if cut or used == 0 then
    clear(state)
    state.window = limit.window
    units, used = used + units, 0
  else
    state.base, state.first = total_before(state, first), first
  end
  if units == 0 then
    return
  end
  if state.width == 5 and used + units >= LOG_WRAP[5] then
    widen(state)
  end
  state.total = advanced(state, state.total, units)
  local newest = state.length - 1
  -- one of the same microsecond, or one that a log in debt has no room for, joins the newest entry
  if newest < state.first or (state.last ~= at and newest - state.first + 1 < limit.amount) then
    newest = newest + 1
    state.length = newest + 1
  end
  state.times[newest], state.totals[newest], state.last = at, state.total, at
  state.changed = min(state.changed, newest)
end

local function refund_newest(state, units)
  local left = units
  while left > 0 do
    local newest = state.length - 1
    local before = total_before(state, newest)
    local held = charged_between(state, before, state.total)
    if held > left then
      fetch(state, newest)
      state.total = advanced(state, before, held - left)
      state.totals[newest] = state.total
      state.changed = min(state.changed, newest)
      return
    end
    left = left - held
    state.times[newest], state.totals[newest] = nil, nil
    state.length, state.total = newest, before
    if newest > state.first then
      fetch(state, newest - 1)
      state.last = state.times[newest - 1]
    else
      state.last = 0
    end
  end
end

-- Takes back from the entry of one moment; the totals of all later ones follow.
local function refund_at(state, first, units, time)
  local index = search(state, first, function(index)
    return state.times[index] < time
  end)
  if index == state.length or state.times[index] ~= time then
    return false
  end
  local before = total_before(state, index)
  local held = charged_between(state, before, state.totals[index])
  local back = min(units, held)
  local target = index
  for i = index, state.length - 1 do
    fetch(state, i)
    local kept = charged_between(state, before, state.totals[i]) - back
    if i > index or back < held then
      state.times[target], state.totals[target] = state.times[i], advanced(state, before, kept)
      target = target + 1
    end
  end
  for i = target, state.length - 1 do
    state.times[i], state.totals[i] = nil, nil
  end
  state.length, state.changed = target, min(state.changed, index)
  state.total = total_before(state, target)
  if target > state.first then
    fetch(state, target - 1)
    state.last = state.times[target - 1]
  else
    state.last = 0
  end
  return true
end

function sliding_log.refund(state, limit, units, time)
  local _, first, used = sliding_log_view(state, limit)
  if used == 0 or units == 0 then
    return false
  end
  if time >= 0 then
    return refund_at(state, first, units, time)
  end
  refund_newest(state, min(units, used))
  return true
end

local function packed_entries(state, from, to)
  local format, parts = LOG_SLOTS[state.width], {}
  for index = from, to - 1 do
    parts[#parts + 1] = pack(format, state.times[index], state.totals[index])
  end
  return table.concat(parts)
end

local function packed_header(state)
  return pack(LOG_HEADER, state.window, state.last, state.ttl_until, state.base, state.total,
    (state.head + state.first) % max(state.capacity, 1), state.length - state.first, state.capacity, state.width)
end

-- The entries that are stored and have not changed, in order, as they are stored.
local function stored_entries(state, stored_capacity)
  local count = min(state.changed, state.length) - state.first
  if count <= 0 or stored_capacity == 0 then
    return ''
  end
  local bytes = 7 + state.width
  local ring = string.sub(redis.call('GET', state.key), LOG_HEADER_BYTES + 1)
  local from = (state.head + state.first) % stored_capacity
  local upto_end = min(count, stored_capacity - from)
  return string.sub(ring, from * bytes + 1, (from + upto_end) * bytes)
    .. string.sub(ring, 1, (count - upto_end) * bytes)
end

-- Writes the whole log into a larger ring: half as large again, but not larger than it will ever need.
local function save_anew(state, limit, ttl)
  local count = state.length - state.first
  local entries = stored_entries(state, state.capacity)
    .. packed_entries(state, max(state.changed, state.first), state.length)
  state.capacity = max(count, min(limit.amount, ceil(count * 1.5), state.capacity * 2 + 4))
  state.head = -state.first
  local padding = string.rep('\0', (state.capacity - count) * (7 + state.width))
  redis.call('SET', state.key, packed_header(state) .. entries .. padding, 'PX', ttl)
end

function sliding_log.save(key, state, limit)
  local grows = not state.exists or state.length - state.first > state.capacity
  state.exists = not grows
  local ttl = next_ttl(state, limit, state.last + state.window)
  if grows then
    return save_anew(state, limit, ttl)
  end
  local bytes, index = 7 + state.width, max(state.changed, state.first)
  while index < state.length do
    local slot = (state.head + index) % state.capacity
    local upto = min(state.length, index + state.capacity - slot)
    redis.call('SETRANGE', key, LOG_HEADER_BYTES + slot * bytes, packed_entries(state, index, upto))
    index = upto
  end
  redis.call('SETRANGE', key, 0, packed_header(state))
  if ttl then
    redis.call('PEXPIRE', key, ttl)
  end
end
