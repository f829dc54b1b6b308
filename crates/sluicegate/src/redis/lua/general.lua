
-- The general path, for the remaining checks: compute how many requests each tier admits, then charge all tiers or none.
local CHARGE, REFUND = 2, 3
local SHADOW, OVERDRAFT = 1, 2 -- bits of the flags

local algorithms = {}

local function set_algorithm(limit)
  algorithms[limit.code] = algorithms[limit.code] or define[limit.code]()
  limit.algorithm = algorithms[limit.code]
end

for _, limit in ipairs(limits) do
  set_algorithm(limit)
end

-- The state of each key loaded so far, false if it cannot be read, and the limit that last changed it.
local states, dirty_limits = {}, {}

-- Returns the state of a key at the present; false if it cannot be read.
local function state_of(key, limit)
  local state = states[key]
  if state == nil then
    local raw = stored[key]
    if key > string_keys then
      raw = stored_set(key)
    elseif changed[key] then -- the fast path has written it
      raw = call('GETRANGE', KEYS[key], '0', key > fixed_keys and LOG_HEADER_END or '-1')
    end
    state = limit.algorithm.load(raw, KEYS[key]) or false
    states[key] = state
  end
  if state then
    limit.algorithm.view(state, limit)
  end
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
  local max_used = limit.capacity - (overdraft and min(cost, 1) or cost)
  if max_used >= 0 and state.used <= max_used then
    return 1 -- units are available, but the counter has too many holds
  end
  return max_used < 0 and -1 or limit.algorithm.wait(state, limit, max_used)
end

local function packed_answer(state, limit, passed, charged, wait, leased)
  local reset, spare = limit.algorithm.reset(state, limit)
  return pack(ANSWER, passed, charged, limit.capacity - state.used, wait, reset, spare, leased)
end

local function answer(state, limit, passed, charged, wait, leased)
  replies[#replies + 1] = packed_answer(state, limit, passed, charged, wait, leased)
end

local UNREADABLE = pack(ANSWER, 0, 0, 0, -2, 0, 0, 0)

-- Answers a check that is not decided, because the state of a tier cannot be read.
local function answer_unreadable(group, first)
  for tier = 1, group.tiers do
    local state = state_of(group.fields[first + tier], group.terms[tier])
    replies[#replies + 1] = state and NO_ANSWER or UNREADABLE
  end
end

-- Applies an unconditional operation to one tier.
local function adjust_tier(group, tier, count, key)
  local limit = group.terms[tier]
  -- only holds change live holds
  local units = limit.code == CONCURRENCY and 0 or min(count * group.costs[tier], MAX_EXACT)
  local state = state_of(key, limit)
  if group.operation == REFUND then
    if limit.algorithm.refund(state, limit, units, group.time) then
      dirty_limits[key] = limit
    elseif group.path == LEASED then
      count = 0 -- nothing was refunded
    end
  elseif units > 0 then
    limit.algorithm.charge(state, limit, units)
    dirty_limits[key] = limit
  end
  answer(state, limit, count, 0, 0, 0)
end

local function adjust(group, first, count)
  for tier = 1, group.tiers do
    if not state_of(group.fields[first + tier], group.terms[tier]) then
      return answer_unreadable(group, first)
    end
  end
  if group.path == LEASED then
    count = end_lease(group, first)
  end
  for tier = 1, group.tiers do
    adjust_tier(group, tier, count, group.fields[first + tier])
  end
end

local function decide(group, first, count)
  local fields, flags, passes, is_leased = group.fields, group.flags, {}, group.path == LEASED
  local granted = group.operation == CHECK and count or 0
  for tier = 1, group.tiers do
    local limit = group.terms[tier]
    local state = state_of(fields[first + tier], limit)
    if not state then
      return answer_unreadable(group, first)
    end
    local free = limit.capacity - state.used
    passes[tier] = passing(free, group.costs[tier], flags[tier] >= OVERDRAFT, count)
    if flags[tier] % 2 < SHADOW then
      granted = min(granted, passes[tier])
    end
  end
  if is_leased and granted == count and granted > 0 then
    local free, is_shadow_denial = {}, false
    for tier = 1, group.tiers do
      free[tier] = group.terms[tier].capacity - states[fields[first + tier]].used - count * group.costs[tier]
      is_shadow_denial = is_shadow_denial or passes[tier] < count
    end
    local drawn = is_shadow_denial and 0 or draw(group, first, free)
    count, granted = count + drawn, granted + drawn
    for tier = 1, group.tiers do
      passes[tier] = passes[tier] + drawn
    end
  end
  for tier = 1, group.tiers do
    local key, limit, cost, passed = fields[first + tier], group.terms[tier], group.costs[tier], passes[tier]
    local state, charged = states[key], min(granted, passed)
    if charged * cost > 0 then
      limit.algorithm.charge(state, limit, charged * cost)
      dirty_limits[key] = limit
    end
    local wait = 0
    if passed < count and charged == passed then
      wait = retry(state, limit, cost, flags[tier] >= OVERDRAFT)
    end
    answer(state, limit, passed, charged, wait, is_leased and leased_units(group, first + tier) or 0)
  end
end
