
-- The fast path of holds: new holds, and settlements of live holds, if every tier is a concurrency counter, or a fixed window or token
-- bucket without on_expiry = "release". ../hold.lua describes the stored format.
--
-- The answers follow all numbers of the reply, so they are collected here. If the general path decides a check, the number of answers
-- before it is recorded.
local held_answers, decide_held_group, save_held = {}, nil, nil

if has_holds then
  -- The current check, by tier.
  local costs, keys, indexes, record_keys, afters = {}, {}, {}, {}, {}
  -- The hold to settle, by tier.
  local releases_of, units_of, times, expiries, actuals, excesses, last_attempts, settled_limits = {}, {}, {}, {}, {}, {}, {}, {}
  -- By index: the number of holds, when the last one is removed (nil: unknown), until when the index must exist, and whether it was empty.
  -- By key: the units of a concurrency counter that have changed.
  local held, last_removals, needed_until, was_empty, units_after = {}, {}, {}, {}, {}
  local limits_by_text, time_texts, ttl_texts = {}, {}, {}

  read[CONCURRENCY] = function(key)
    local raw = stored_set(key)
    local used = raw and tonumber(raw)
    used = used and -1 - used or (raw and -1 or 0)
    return used >= 0 and used % 1 == 0 and used
  end

  local function is_fast_limit(limit)
    local code = limit.code
    return (code == FIXED_WINDOW or code == TOKEN_BUCKET or code == CONCURRENCY) and limit.ceiling < MAX_FAST
  end

  local function level_of(key, limit)
    local level = levels[key]
    if level == nil then
      level = read[limit.code](key, limit)
      levels[key], limit_of[key] = level, limit
    end
    return limit_of[key] == limit and level
  end

  -- Returns a time as a score, and the TTL until then. Most holds of a batch expire at the same time, and formatting a number costs as
  -- much as a write.
  local function text_of(time)
    local text = time_texts[time]
    if not text then
      text = string.format('%.0f', time)
      time_texts[time] = text
      ttl_texts[time] = string.format('%.0f', ceil((time - now) / 1000) + 1 + (injected and INJECTED_TTL_MS or 0))
    end
    return text, ttl_texts[time]
  end

  -- Returns when the last hold is removed from an index that is not empty.
  local function last_removal(index)
    local last = last_removals[index]
    if not last then
      last = tonumber(call('ZREVRANGE', KEYS[index], '0', '0', 'WITHSCORES')[2])
      last_removals[index] = last
    end
    return last
  end

  local function set_level(key, limit, level)
    levels[key] = level
    if limit.code == CONCURRENCY then
      units_after[key] = level
    else
      changed[key] = level
    end
  end

  -- Returns the answer to an admitted operation, with the level after it.
  local function packed_level(limit, level, index, charged)
    local code, used, reset, spare = limit.code, level, 0, 0
    if code == TOKEN_BUCKET then
      local units, micros = limit.units, limit.micros
      used, reset = ceil(level / micros), ceil(level / units)
      spare = reset * units - level
    elseif level > 0 then
      reset = (code == FIXED_WINDOW and window_end(limit) or max(last_removal(index), now + 1)) - now
    end
    return pack(ANSWER, 1, charged, limit.capacity - used, 0, reset, spare, 0)
  end

  -- Returns whether an index can be read, is not full, and has no hold to remove.
  local function has_room(key, index)
    local count = held[index]
    if not count then
      count = pcall_redis('ZCARD', KEYS[index])
      if type(count) == 'table' then
        return false
      end
      count = count - (index == key and stored[key] and 1 or 0)
      if count > 0 and call('ZCOUNT', KEYS[index], '(' .. text_of(now), (text_of(now + MAX_REMOVAL_DELAY))) < count then
        return false
      end
      held[index], was_empty[index] = count, count == 0
    end
    return count < MAX_LIVE
  end

  -- Makes a hold. Returns false if the general path has to decide it.
  local function hold(group, id, ttl)
    local tiers, terms = group.tiers, group.terms
    for tier = 1, tiers do
      local key, index, limit = keys[tier], indexes[tier], terms[tier]
      if stored[record_keys[tier]] ~= false then
        return false
      end
      local level = level_of(key, limit)
      local after = level and level + costs[tier] * limit.unit
      if not after or after == level or after > limit.ceiling or not has_room(key, index) then
        return false
      end
      afters[tier] = after
    end
    local expires, forgotten = now + ttl, now + ttl + RETENTION
    local _, record_ttl = text_of(forgotten)
    for tier = 1, tiers do
      local limit, cost, key, index = terms[tier], costs[tier], keys[tier], indexes[tier]
      local releases = limit.code == CONCURRENCY and 1 or 0
      local removal = releases == 1 and expires or forgotten
      call('ZADD', KEYS[index], (text_of(removal)), pack(MEMBER, releases, now, cost) .. id)
      needed_until[index] = max(needed_until[index] or 0, removal)
      if held[index] == 0 then
        last_removals[index] = removal
      elseif last_removals[index] then
        last_removals[index] = max(last_removals[index], removal)
      end
      held[index] = held[index] + 1
      set_level(key, limit, afters[tier])
      local answer, record_key = packed_level(limit, afters[tier], index, 1), record_keys[tier]
      local head = pack(HOLD, 0, releases, cost, now, expires, forgotten, cost, group.excess[tier], now)
      call('SET', KEYS[record_key], head .. group.limit_texts[tier] .. answer, 'PX', record_ttl)
      stored[record_key] = nil
      held_answers[#held_answers + 1] = answer
      held_answers[#held_answers + 1] = pack(RESULT, HELD, 0, now, expires, cost)
    end
    return true
  end

  local function limit_of_record(raw)
    local text = string.sub(raw, HOLD_BYTES + 1, HOLD_BYTES + LIMIT_BYTES)
    local limit = limits_by_text[text]
    if limit == nil then
      limit = read_limit(text, 1)
      for _, other in ipairs(limits) do
        if limit.code == other.code and limit.amount == other.amount and limit.window == other.window
          and limit.capacity == other.capacity and limit.phase == other.phase and limit.units == other.units
          and limit.micros == other.micros then
          limit = other
        end
      end
      limit = is_stored_limit(limit) and is_fast_limit(limit) and is_used[limit.code] and limit or false
      limits_by_text[text] = limit
    end
    return limit
  end

  -- Returns the level after the actual cost replaces the estimate of a hold.
  local function settled_level(limit, level, units, actual, at)
    local code = limit.code
    if code == CONCURRENCY then
      return max(level - units, 0)
    elseif actual >= units then
      return level + (actual - units) * limit.unit
    elseif code == TOKEN_BUCKET then
      -- what is left of that charge if it was the only one: the rate is that of the hold
      local refund = at <= now and (units - actual) * limit.micros - (now - at) * limit.units or 0
      return max(level - max(refund, 0), 0)
    end
    local ends = window_end(limit)
    return at >= ends - limit.window and at < ends and max(level - (units - actual), 0) or level
  end

  -- Reads the hold of a tier to settle. Returns false if the general path has to settle it.
  local function read_hold(group, tier)
    local raw, key = stored[record_keys[tier]], keys[tier]
    if not raw or #raw ~= HOLD_BYTES + LIMIT_BYTES + ANSWER_BYTES or (tier > 1 and stored_set(indexes[tier]) == '') then
      return false
    end
    local is_settled, releases, units, at, expires, forgotten, charged, excess, last_attempt = unpack_from(HOLD, raw)
    local limit = limit_of_record(raw)
    if is_settled == 1 or not (limit and expires > now and excess >= 0 and last_attempt >= 0)
      or not are_stored(units, at, expires, forgotten, charged) or (releases == 1) ~= (limit.code == CONCURRENCY) then
      return false
    end
    local level, most = level_of(key, limit), group.excess[tier]
    if not level then
      return false
    end
    local keeps_estimate = group.flags[tier] % RELEASE >= KEEP
    local actual = min(keeps_estimate and units or costs[tier], units + (most >= 0 and most or excess), MAX_EXACT)
    local after = settled_level(limit, level, units, actual, at)
    releases_of[tier], units_of[tier], times[tier], expiries[tier], actuals[tier] = releases, units, at, expires, actual
    excesses[tier], last_attempts[tier], settled_limits[tier], afters[tier] = excess, last_attempt, limit, after
    return after < MAX_FAST
  end

  local function remove_from_index(index, removal)
    if held[index] then
      held[index] = held[index] - 1
    end
    if last_removals[index] and removal >= last_removals[index] then
      last_removals[index] = nil
    end
  end

  local UNKNOWN_HOLD = pack(RESULT, UNKNOWN, 0, 0, 0, 0)

  -- Settles a hold. Returns false if the general path has to settle it.
  local function settle(group, id)
    for tier = 1, group.tiers do
      if not read_hold(group, tier) then
        return false
      end
    end
    for tier = 1, group.tiers do
      local key, index, limit, releases = keys[tier], indexes[tier], settled_limits[tier], releases_of[tier]
      local units, at, expires, actual, after = units_of[tier], times[tier], expiries[tier], actuals[tier], afters[tier]
      local answer, result = NO_ANSWER, UNKNOWN_HOLD
      local removed = pcall_redis('ZREM', KEYS[index], pack(MEMBER, releases, at, units) .. id)
      if type(removed) == 'table' then
        return false -- the index of the first tier cannot be read, so nothing has changed
      elseif removed == 1 then
        remove_from_index(index, releases == 1 and expires or expires + RETENTION)
        local level = levels[key]
        if after ~= level then
          if limit.code == FIXED_WINDOW then
            local is_refunded = after < level and (not changed[key] or changed[key] == extra[key])
            extra[key] = is_refunded and after or nil
          end
          set_level(key, limit, after)
        end
        local record_key = record_keys[tier]
        call('SETRANGE', KEYS[record_key], '0',
          pack(HOLD, 1, releases, units, at, expires, now + RETENTION, actual, excesses[tier], last_attempts[tier]))
        if expires > now + RETENTION then -- otherwise it lives at most twice as long as needed
          local _, settled_ttl = text_of(now + RETENTION)
          call('PEXPIRE', KEYS[record_key], settled_ttl)
        end
        stored[record_key] = nil
        answer, result = packed_level(limit, after, index, 0), pack(RESULT, SETTLED, 0, at, expires, actual)
      end
      held_answers[#held_answers + 1] = answer
      held_answers[#held_answers + 1] = result
    end
    return true
  end

  -- Decides a group of holds. Reads each check from the plan; ../hold_groups.lua has the format.
  function decide_held_group(group_number, group)
    local tiers, position, operation = group.tiers, group.position, group.operation
    local is_hold = operation == CHECK or operation == HOLD_NEW
    local is_fast = is_hold or operation == SETTLE
    for tier = 1, tiers do
      local limit = group.terms[tier]
      local flags = limit.code == CONCURRENCY and RELEASE or 0
      if is_hold and not (group.flags[tier] == flags and is_fast_limit(limit)) then
        is_fast = false
      end
    end
    for first = 1, group.checks do
      local start, count, ttl, id = position, nil, nil, nil
      count, ttl, id, position = unpack_from('<I4dHc0', plan, position)
      for tier = 1, tiers do
        costs[tier], keys[tier], indexes[tier], record_keys[tier], position = unpack_from('<dHHH', plan, position)
        if indexes[tier] == 0 then
          indexes[tier] = keys[tier]
        end
      end
      local is_decided = is_fast and id ~= '' and count == 1
      if is_decided and is_hold then
        is_decided = hold(group, id, ttl)
      elseif is_decided then
        is_decided = settle(group, id)
      end
      if not is_decided then
        remaining[#remaining + 1] = { group = group_number, first = first, position = start, after = #held_answers }
        for tier = 1, tiers do
          levels[keys[tier]] = false
        end
      end
    end
    replies[group_number] = rep(pack('<d', -1) .. rep(pack('<d', 0), tiers), group.checks)
  end

  -- Writes the units of concurrency counters and the TTLs of indexes. After holds are settled, a TTL may be longer than necessary.
  function save_held()
    for key, units in pairs(units_after) do
      if units > 0 then
        stored[key] = string.format('%.0f', -1 - units)
        call('ZADD', KEYS[key], stored[key], '')
      elseif stored[key] then
        stored[key] = false
        call('ZREM', KEYS[key], '')
      end
    end
    for index, time in pairs(needed_until) do
      local _, ttl = text_of(time)
      if was_empty[index] or call('PTTL', KEYS[index]) < tonumber(ttl) then
        call('PEXPIRE', KEYS[index], ttl)
      end
    end
  end
end
