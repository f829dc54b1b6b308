
-- The decision: ask every tier of a check how many requests would pass, then charge all tiers or none.
local ALGORITHMS = { fixed_window, sliding_counter, token_bucket, sliding_log }
local CHECK, CHARGE, REFUND = 0, 2, 3
local SHADOW, OVERDRAFT, MORE = 1, 2, 4 -- bits of the flags

local algorithms = {}
for _, limit in ipairs(limits) do
  algorithms[limit.code] = algorithms[limit.code] or ALGORITHMS[limit.code]()
  limit.algorithm = algorithms[limit.code]
end

-- What is known of each key so far, and under which limit it was last changed.
local states, written_under = {}, {}

local function state_of(key, limit)
  local state = states[key]
  if not state then
    local raw = strings[key]
    if key > plain_keys then
      raw = call('GETRANGE', KEYS[key], '0', LOG_HEADER_END)
      raw = raw ~= '' and raw
    end
    state = limit.algorithm.load(raw, KEYS[key])
    states[key] = state
  end
  limit.algorithm.view(state, limit)
  return state
end

local function passing(free, cost, overdraft, count)
  if free < (overdraft and min(cost, 1) or cost) then
    return 0
  elseif cost == 0 then
    return count
  end
  return min(overdraft and ceil(free / cost) or floor(free / cost), count)
end

local function retry(state, limit, cost, overdraft)
  local room = limit.capacity - (overdraft and min(cost, 1) or cost)
  return room < 0 and -1 or limit.algorithm.wait(state, limit, room)
end

local function reply(number, state, limit, passed, charged, wait)
  local reset, spare = limit.algorithm.reset(state, limit)
  replies[number + 1] = pack('<I4I4dddd', passed, charged, limit.capacity - state.used, wait, reset, spare)
end

local size = 0
local numbers, keys, terms, costs, flags, passes = {}, {}, {}, {}, {}, {}
for next_tier = 1, #rest, 2 do
  local operation, count, at, index, limit
  size = size + 1
  numbers[size], position = rest[next_tier], rest[next_tier + 1]
  operation, flags[size], count, keys[size], index, costs[size], position = unpack_from('<BBI4HHd', plan, position)
  terms[size] = limits[index]
  if operation == REFUND then
    at = unpack_from('<d', plan, position)
  end
  if operation >= CHARGE then
    -- unconditional: tier by tier
    local number, key, cost = numbers[size], keys[size], costs[size]
    limit, size = terms[size], 0
    local state, units = state_of(key, limit), min(count * cost, MAX_EXACT)
    if operation == REFUND then
      if limit.algorithm.refund(state, limit, units, at) then
        written_under[key] = limit
      end
    elseif units > 0 then
      limit.algorithm.charge(state, limit, units)
      written_under[key] = limit
    end
    reply(number, state, limit, count, 0, 0)
  elseif flags[size] % 8 < MORE then
    local granted = operation == CHECK and count or 0
    for tier = 1, size do
      limit = terms[tier]
      local free = limit.capacity - state_of(keys[tier], limit).used
      passes[tier] = passing(free, costs[tier], flags[tier] % 4 >= OVERDRAFT, count)
      if flags[tier] % 2 < SHADOW then
        granted = min(granted, passes[tier])
      end
    end
    for tier = 1, size do
      local key, cost, passed = keys[tier], costs[tier], passes[tier]
      local state, charged = states[key], min(granted, passed)
      limit = terms[tier]
      if charged * cost > 0 then
        limit.algorithm.charge(state, limit, charged * cost)
        written_under[key] = limit
      end
      local wait = 0
      if passed < count and charged == passed then
        wait = retry(state, limit, cost, flags[tier] % 4 >= OVERDRAFT)
      end
      reply(numbers[tier], state, limit, passed, charged, wait)
    end
    size = 0
  end
end

for key, limit in pairs(written_under) do
  limit.algorithm.save(KEYS[key], states[key], limit)
end

return table.concat(replies)
