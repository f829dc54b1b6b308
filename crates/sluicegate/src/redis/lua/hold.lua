
-- Holds: admitted checks whose cost is corrected later. Each hold of a counter has
--   * a record under its own key, '<BBddddddd': 1 if it is settled, 1 if it is released when it expires, units of its estimate, when it was
--     made, when it expires, until when its id is kept, units that it has charged, the most units to charge beyond the estimate, when it was
--     made or last repeated; then its limit (as in ARGV[2]) and the answer to the check that made it (as in the reply)
--   * while it is live, a member of the counter's index, a sorted set: '<Bdd', 1 if it is released when it expires, when it was made
--     and its units; then the id. The score is the time at which it is removed from the index: when it expires, or for a hold that stays
--     charged, when its id is forgotten
-- If a record has no member, the hold is settled, was released, or was lost in a reset of the counter.
local decide_held, save_hold_indexes

if has_holds then
  -- The records by key, and the indexes that have changed: the key of the counter and its limit.
  local records, changed_indexes = {}, {}

  -- Returns the record of a hold; nil if there is none, false if it cannot be read.
  local function record_of(key)
    local record = records[key]
    if stored[key] == nil then -- the fast path has written it
      stored[key] = call('GET', KEYS[key])
    end
    if record ~= nil or not stored[key] then
      return record
    end
    local raw = stored[key]
    records[key] = false
    if #raw ~= HOLD_BYTES + LIMIT_BYTES + ANSWER_BYTES then
      return false
    end
    local is_settled, releases
    record = { limit = read_limit(raw, HOLD_BYTES + 1), limit_text = string.sub(raw, HOLD_BYTES + 1, HOLD_BYTES + LIMIT_BYTES),
      answer = string.sub(raw, HOLD_BYTES + LIMIT_BYTES + 1) }
    is_settled, releases, record.units, record.at, record.expires, record.kept_until, record.charged, record.excess, record.last_attempt =
      unpack_from(HOLD, raw)
    local limit = record.limit
    if not (are_stored(record.units, record.at, record.expires, record.kept_until, record.charged) and record.excess >= 0
      and record.last_attempt >= 0 and define[limit.code] and is_stored_limit(limit)) then
      return false
    end
    set_algorithm(limit)
    limit.made_under = limit
    if limit.ends and now >= limit.next_end then
      -- The recorded periods are over, and this call does not have the current one.
      limit.is_period_unknown = true
      limit.start, limit.ends, limit.next_end = now, now + 1, now + 1 + limit.window
    end
    record.is_settled, record.releases = is_settled == 1, releases == 1
    records[key] = record
    return record
  end

  local function member_of(record, id)
    return pack(MEMBER, record.releases and 1 or 0, record.at, record.units) .. id
  end

  -- Returns the record of the hold at `place`; nil if there is none or it was reset, false if it cannot be read.
  local function valid_record(group, place, id)
    local record = record_of(group.records[place])
    if not record then
      return record
    elseif record.kept_until <= now then
      return nil
    elseif record.is_settled or (record.releases and record.expires <= now)
      or call('ZSCORE', KEYS[group.indexes[place]], member_of(record, id)) then
      return record
    end
    return nil
  end

  local function save_record(key, record)
    records[key] = record
    local millis = ceil((record.kept_until - now) / 1000) + 1 + (injected and INJECTED_TTL_MS or 0)
    local head = pack(HOLD, record.is_settled and 1 or 0, record.releases and 1 or 0, record.units, record.at, record.expires,
      record.kept_until, record.charged, record.excess, record.last_attempt)
    call('SET', KEYS[key], head .. record.limit_text .. record.answer, 'PX', string.format('%.0f', millis))
  end

  -- Adds a hold to the index, or moves it.
  local function add_to_index(key, index, record, id)
    local removal = record.releases and record.expires or record.kept_until
    call('ZADD', KEYS[index], string.format('%.0f', removal), member_of(record, id))
    changed_indexes[index] = { key = key, limit = record.limit, releases = record.releases }
  end

  local function remove_from_index(key, index, record, id)
    changed_indexes[index] = changed_indexes[index] or { key = key, limit = record.limit, releases = record.releases }
    return call('ZREM', KEYS[index], member_of(record, id)) == 1
  end

  -- The TTL of an index covers its last hold. If expired holds are released, the index also lives until their counter is empty, so that the
  -- next check can refund them.
  function save_hold_indexes()
    for index, counter in pairs(changed_indexes) do
      local last, limit, extra = call('ZREVRANGE', KEYS[index], '0', '0', 'WITHSCORES'), counter.limit, 0
      if last[1] == '' then
        call('DEL', KEYS[index]) -- only the counter is left
      elseif last[1] then
        if limit.code ~= CONCURRENCY and (counter.releases or string.byte(last[1]) == 1) then
          extra = limit.algorithm.reset(state_of(counter.key, limit), limit)
        end
        local millis = ceil((max(tonumber(last[2]) - now, 0) + extra) / 1000) + 1 + (injected and INJECTED_TTL_MS or 0)
        call('PEXPIRE', KEYS[index], string.format('%.0f', millis))
      end
    end
  end

  local function refund(key, state, limit, units, at)
    if limit.algorithm.refund(state, limit, units, at) then
      dirty_limits[key] = limit
    end
  end

  local function charge(key, state, limit, units)
    if units > 0 then
      limit.algorithm.charge(state, limit, units)
      dirty_limits[key] = limit
    end
  end

  -- Returns the limit under which a correction is applied. If the counter was charged under another window or rate since, the correction
  -- uses that one, so that it does not convert the other units. The state is viewed under it.
  local function correction_limit(state, limit)
    local window, phase, units, micros = limit.algorithm.own_limit(state, limit)
    if window == limit.window and units == limit.units and micros == limit.micros then
      return limit
    end
    local own = setmetatable({ window = window, phase = phase, units = units, micros = micros, ends = false, is_period_unknown = false },
      { __index = limit })
    limit.algorithm.view(state, own)
    if state.used == 0 then
      limit.algorithm.view(state, limit)
      return limit
    end
    return own
  end

  -- Corrects the units of a hold, and views the state under its limit again.
  local function correct(key, state, limit, apply, units, at)
    local own = correction_limit(state, limit)
    apply(key, state, own, units, at)
    if own ~= limit then
      limit.algorithm.view(state, limit)
    end
  end

  -- Returns the last members of an index that would be removed later than any new hold: they are from before the clock was set back.
  local function members_from_future(index)
    local latest, members = now + MAX_REMOVAL_DELAY, {}
    local last = call('ZREVRANGE', KEYS[index], '0', '0', 'WITHSCORES')
    if last[2] and tonumber(last[2]) > latest then
      last = call('ZREVRANGE', KEYS[index], '0', string.format('%.0f', MAX_RELEASED - 1), 'WITHSCORES')
      for place = 1, #last, 2 do
        if tonumber(last[place + 1]) > latest then
          members[#members + 1] = last[place]
        end
      end
    end
    return members
  end

  -- Releases some expired holds of a counter, and returns how many.
  local function release_expired(key, index, state, limit)
    local members = call('ZRANGEBYSCORE', KEYS[index], '0', string.format('%.0f', now), 'LIMIT', '0', MAX_RELEASED)
    if #members == 0 then
      members = members_from_future(index)
    end
    if #members == 0 then
      return 0
    end
    call('ZREM', KEYS[index], unpack(members))
    changed_indexes[index] = changed_indexes[index] or { key = key, limit = limit, releases = true }
    for _, member in ipairs(members) do
      if #member >= MEMBER_BYTES then
        local releases, at, units = unpack_from(MEMBER, member)
        if releases == 1 and are_stored(at, units, 0, 0, 0) then
          refund(key, state, limit, units, at)
        end
      end
    end
    return #members
  end

  local NO_RESULT = pack(RESULT, NOT_HELD, 0, 0, 0, 0)

  local function reply(text, outcome, record, released)
    if record then
      replies[#replies + 1] = text .. pack(RESULT, outcome, released or 0, record.at, record.expires, record.charged)
    else
      replies[#replies + 1] = text .. pack(RESULT, outcome, released or 0, 0, 0, 0)
    end
  end

  -- Replies to a check that is not decided, because a key of a tier cannot be read.
  local function reply_unreadable(unreadable)
    for tier = 1, #unreadable do
      replies[#replies + 1] = (unreadable[tier] and UNREADABLE or NO_ANSWER) .. NO_RESULT
    end
  end

  -- Returns whether a hold repeats the live hold of a record. A hold whose id must be new never does.
  local function is_repeated(group, tier, record)
    return group.operation ~= HOLD_NEW and not record.is_settled and record.expires > now
      and record.units == group.costs[tier]
  end

  -- Replies to a hold that conflicts with another one of the same id.
  local function reply_conflict(group, known)
    for tier = 1, group.tiers do
      local record = known[tier]
      if not record then
        reply(NO_ANSWER, NOT_HELD)
      elseif is_repeated(group, tier, record) then
        reply(record.answer, REPEATED, record)
      else
        reply(NO_ANSWER, CONFLICT, record)
      end
    end
  end

  -- Reverts a hold on one counter as if it had not been made. Returns the state of the counter.
  local function revert(group, place, record, id)
    local key, index, record_key = group.fields[place], group.indexes[place], group.records[place]
    local state = state_of(key, record.limit)
    if remove_from_index(key, index, record, id) then
      correct(key, state, record.limit, refund, record.units, record.at)
    end
    call('DEL', KEYS[record_key])
    records[record_key], stored[record_key] = nil, false
    return state
  end

  -- Replies for a tier that already has the hold. If another tier denies it, the hold is reverted.
  local function repeat_tier(group, place, record, id, is_granted)
    if not is_granted then
      local state = revert(group, place, record, id)
      return reply(packed_answer(state, record.limit, 1, 0, 0, 0), NOT_HELD)
    end
    if record.last_attempt < now then
      record.last_attempt = now
      save_record(group.records[place], record)
    end
    reply(record.answer, REPEATED, record)
  end

  -- Returns whether one free unit admits a request. Live holds never exceed their limit.
  local function is_overdraft(group, tier)
    return group.flags[tier] % KEEP >= OVERDRAFT and group.terms[tier].code ~= CONCURRENCY
  end

  -- Charges one counter of a check, and records the charge as a hold if it has an id.
  local function charge_tier(group, first, tier, passed, granted, released)
    local place, id = first + tier, group.ids[first]
    local limit, cost, key = group.terms[tier], group.costs[tier], group.fields[place]
    local state, charged, count, record = states[key], min(granted, passed), group.fields[first], nil
    if limit.code == CONCURRENCY and id == '' then
      charged = 0 -- only holds change live holds
    end
    charge(key, state, limit, charged * cost)
    if id ~= '' and charged > 0 then
      local expires = now + group.ttls[first]
      record = { units = cost, at = now, expires = expires, kept_until = expires + RETENTION, charged = cost,
        excess = group.excess[tier], releases = group.flags[tier] >= RELEASE, last_attempt = now, limit = limit,
        limit_text = group.limit_texts[tier] }
      add_to_index(key, group.indexes[place], record, id)
    end
    local wait = 0
    if passed < count and charged == passed then
      wait = retry(state, limit, cost, is_overdraft(group, tier))
    end
    local text = packed_answer(state, limit, passed, charged, wait, 0)
    if record then
      record.answer = text
      save_record(group.records[place], record)
    end
    reply(text, record and HELD or NOT_HELD, record, released)
  end

  -- Replies to a hold on a counter that has too many holds.
  local function reply_full(group, first, known, full)
    for tier = 1, group.tiers do
      if known[tier] then
        revert(group, first + tier, known[tier], group.ids[first])
      end
      reply(NO_ANSWER, full[tier] and FULL or NOT_HELD)
    end
  end

  -- Decides a check, or a hold on the counters that do not have it yet. If they deny it, the hold is reverted on the counters that have it.
  local function decide_or_complete(group, first, count, known)
    local is_check, passes, released, full, is_full = group.operation ~= PEEK, {}, {}, {}, false
    local granted = is_check and count or 0
    for tier = 1, group.tiers do
      if not known[tier] then
        local key, index, limit = group.fields[first + tier], group.indexes[first + tier], group.terms[tier]
        local state, flags = state_of(key, limit), group.flags[tier]
        released[tier] = is_check and release_expired(key, index, state, limit) or 0
        passes[tier] = passing(limit.capacity - state.used, group.costs[tier], is_overdraft(group, tier), count)
        if flags % 2 < SHADOW then
          granted = min(granted, passes[tier])
        end
        full[tier] = group.ids[first] ~= '' and call('ZCOUNT', KEYS[index], '0', '+inf') >= MAX_LIVE
        if full[tier] and flags % 2 >= SHADOW then
          passes[tier], full[tier] = 0, false -- it never denies
        end
        is_full = is_full or full[tier]
      end
    end
    if is_full then
      return reply_full(group, first, known, full)
    end
    for tier = 1, group.tiers do
      if known[tier] then
        repeat_tier(group, first + tier, known[tier], group.ids[first], granted > 0)
      else
        charge_tier(group, first, tier, passes[tier], granted, released[tier])
      end
    end
  end

  local function hold(group, first, count)
    local id, known, unreadable, is_unreadable, has_conflict = group.ids[first], {}, {}, false, false
    for tier = 1, group.tiers do
      local place, record = first + tier, nil
      unreadable[tier] = stored_set(group.indexes[place]) == '' or not state_of(group.fields[place], group.terms[tier])
      if id ~= '' and not unreadable[tier] then
        record = valid_record(group, place, id)
        unreadable[tier] = record == false
      end
      known[tier], is_unreadable = record, is_unreadable or unreadable[tier]
      has_conflict = has_conflict or (record and not is_repeated(group, tier, record))
    end
    if is_unreadable then
      reply_unreadable(unreadable)
    elseif has_conflict then
      reply_conflict(group, known)
    else
      decide_or_complete(group, first, count, known)
    end
  end

  -- Replaces the estimate of a hold with the actual cost.
  local function settle(key, index, state, record, id, actual, excess)
    local limit, units = record.limit, record.units
    actual = min(actual, units + (excess >= 0 and excess or record.excess), MAX_EXACT)
    local was_charged = remove_from_index(key, index, record, id)
    if limit.code == CONCURRENCY then
      if was_charged then
        refund(key, state, limit, units, -1)
      end
    elseif not was_charged then
      correct(key, state, limit, charge, actual)
    elseif actual < units then
      correct(key, state, limit, refund, units - actual, record.at)
    else
      correct(key, state, limit, charge, actual - units)
    end
    record.is_settled, record.charged, record.kept_until = true, actual, now + RETENTION
  end

  -- Settles, renews or reverts the hold of one counter.
  local function adjust_hold(group, first, tier, record)
    local place, id, operation = first + tier, group.ids[first], group.operation
    local key, index, record_key = group.fields[place], group.indexes[place], group.records[place]
    -- the hold is kept if a later attempt repeated it, or if it expired before the denial
    local is_kept = operation == REVERT and record
      and (record.is_settled or record.last_attempt > group.time or record.expires <= group.time)
    if not record or is_kept then
      return reply(NO_ANSWER, UNKNOWN)
    elseif record.is_settled then
      return reply(NO_ANSWER, ALREADY, record)
    end
    local limit, state, is_late = record.limit, state_of(key, record.limit), record.expires <= now
    local outcome = is_late and LATE or SETTLED
    if operation == SETTLE then
      local keeps_estimate = group.flags[tier] % RELEASE >= KEEP
      settle(key, index, state, record, id, keeps_estimate and record.units or group.costs[tier], group.excess[tier])
      save_record(record_key, record)
    elseif operation == RENEW then
      if is_late then
        return reply(NO_ANSWER, LATE, record)
      end
      record.expires = max(record.expires, now + group.ttls[first])
      record.kept_until, outcome = record.expires + RETENTION, RENEWED
      add_to_index(key, index, record, id)
      save_record(record_key, record)
    else
      revert(group, place, record, id)
      outcome = SETTLED
    end
    reply(packed_answer(state, limit, 1, 0, 0, 0), outcome, record)
  end

  local function adjust(group, first)
    local known, unreadable, is_unreadable = {}, {}, false
    for tier = 1, group.tiers do
      local place, record = first + tier, nil
      unreadable[tier] = stored_set(group.indexes[place]) == ''
      if not unreadable[tier] then
        record = valid_record(group, place, group.ids[first])
        unreadable[tier] = record == false or (record ~= nil and not state_of(group.fields[place], record.limit))
      end
      known[tier], is_unreadable = record, is_unreadable or unreadable[tier]
    end
    if is_unreadable then
      return reply_unreadable(unreadable)
    end
    for tier = 1, group.tiers do
      adjust_hold(group, first, tier, known[tier])
    end
  end

  function decide_held(group, first, count)
    if group.operation <= PEEK or group.operation == HOLD_NEW then
      hold(group, first, count)
    else
      adjust(group, first)
    end
  end
end
