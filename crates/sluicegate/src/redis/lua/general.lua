
-- The general path, for the remaining checks: compute how many requests each tier admits, then charge all tiers or none.
local CHARGE, REFUND = 2, 3
local SHADOW, OVERDRAFT = 1, 2 -- bits of the flags

local algorithms = {}
for _, limit in ipairs(limits) do
  algorithms[limit.code] = algorithms[limit.code] or define[limit.code]()
  limit.algorithm = algorithms[limit.code]
end

-- The state of each key read so far, and the limit that last changed it.
local states, dirty_limits = {}, {}

local function state_of(key, limit)
  local state = states[key]
  if not state then
    local raw = fixed_states[key]
    if key > fixed_keys then
      raw = call('GETRANGE', KEYS[key], '0', LOG_HEADER_END)
      raw = raw ~= '' and raw
    elseif changed[key] then
      raw = call('GET', KEYS[key]) -- the fast path has written it
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
  local max_used = limit.capacity - (overdraft and min(cost, 1) or cost)
  return max_used < 0 and -1 or limit.algorithm.wait(state, limit, max_used)
end

local function answer(state, limit, passed, charged, wait)
  local reset, spare = limit.algorithm.reset(state, limit)
  replies[#replies + 1] = pack('<I4I4dddd', passed, charged, limit.capacity - state.used, wait, reset, spare)
end

-- Applies an unconditional operation to one tier.
local function adjust(group, tier, count, key)
  local limit, units = group.terms[tier], min(count * group.costs[tier], MAX_EXACT)
  local state = state_of(key, limit)
  if group.operation == REFUND then
    if limit.algorithm.refund(state, limit, units, group.time) then
      dirty_limits[key] = limit
    end
  elseif units > 0 then
    limit.algorithm.charge(state, limit, units)
    dirty_limits[key] = limit
  end
  answer(state, limit, count, 0, 0)
end

local function decide(group, first, count)
  local fields, flags, passes = group.fields, group.flags, {}
  local granted = group.operation == CHECK and count or 0
  for tier = 1, group.tiers do
    local limit = group.terms[tier]
    local free = limit.capacity - state_of(fields[first + tier], limit).used
    passes[tier] = passing(free, group.costs[tier], flags[tier] >= OVERDRAFT, count)
    if flags[tier] % 2 < SHADOW then
      granted = min(granted, passes[tier])
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
    answer(state, limit, passed, charged, wait)
  end
end

-- Remaining checks of the fast bucket path come first here: restore the order of the plan.
table.sort(remaining, function(one, other)
  return one.group < other.group or (one.group == other.group and one.first < other.first)
end)
for _, check in ipairs(remaining) do
  local group, first = groups[check.group], check.first
  local count = group.fields[first]
  if group.operation >= CHARGE then
    for tier = 1, group.tiers do
      adjust(group, tier, count, group.fields[first + tier])
    end
  else
    decide(group, first, count)
  end
end

for key, limit in pairs(dirty_limits) do
  limit.algorithm.save(KEYS[key], states[key], limit)
end

return reply_header .. table.concat(replies)
