
-- Holds: admitted checks whose cost is corrected later. Each hold of a counter has
--   * a record under its own key, '<BBdddddd': 1 if it is settled, 1 if it is released when it expires, units of its estimate, when it was
--     made, when it expires, until when its id is known, units that it has charged, the most units to charge beyond the estimate; then
--     its limit (as in ARGV[2]) and the answer to the check that made it (as in the reply)
--   * as long as it is live, a member of the counter's index, a sorted set: '<Bdd', 1 if it is released when it expires, when it was made
--     and its units; then the id. The score is the time at which it leaves the index: when it expires, or for a hold that stays
--     charged, when its id is forgotten
-- A record without a member was reset, unless it is settled or was released.
local decide_held, save_hold_indexes

if has_holds then
  local NOT_HELD, MADE, REPEATED, RENEWED, SETTLED, ALREADY, LATE, UNKNOWN, CONFLICT, FULL = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
  local SETTLE, RENEW, TAKE_BACK = 4, 5, 6
  local KEEP = 4 -- a bit of the flags
  local RETENTION, MAX_LIVE, MAX_RELEASED = 60000000, 100000, '16'
  local HOLD, HOLD_BYTES, MEMBER, MEMBER_BYTES = '<BBdddddd', 50, '<Bdd', 17
  local RECORD_BYTES = 48
  local RESULT = '<BI4ddd'
  local records, index_ttls = {}, {}

  -- Returns the record of a hold; nil if the id is not known, false if it cannot be read.
  local function record_of(key)
    local record = records[key]
    if record ~= nil or not stored[key] then
      return record
    end
    local raw = stored[key]
    records[key] = false
    if #raw ~= HOLD_BYTES + LIMIT_BYTES + RECORD_BYTES then
      return false
    end
    local is_settled, releases
    record = { limit = read_limit(raw, HOLD_BYTES + 1), limit_text = string.sub(raw, HOLD_BYTES + 1, HOLD_BYTES + LIMIT_BYTES),
      answer = string.sub(raw, HOLD_BYTES + LIMIT_BYTES + 1) }
    is_settled, releases, record.units, record.at, record.expires, record.known_until, record.charged, record.excess =
      unpack_from(HOLD, raw)
    local limit = record.limit
    if not (are_stored(record.units, record.at, record.expires, record.known_until, record.charged) and record.excess >= 0
      and define[limit.code] and are_stored(limit.amount, limit.window, limit.capacity, limit.phase, limit.units)
      and limit.micros > 0 and (limit.window > 0 or limit.code == CONCURRENCY)) then
      return false
    end
    set_algorithm(limit)
    -- the edges are those of the hold: later periods are as long as its second one
    while limit.ends and now >= limit.next_end and limit.next_end > limit.ends do
      limit.start, limit.ends, limit.next_end = limit.ends, limit.next_end, 2 * limit.next_end - limit.ends
    end
    record.is_settled, record.releases = is_settled == 1, releases == 1
    records[key] = record
    return record
  end

  local function member_of(record, id)
    return pack(MEMBER, record.releases and 1 or 0, record.at, record.units) .. id
  end

  -- Returns the record of the hold at `place`; nil if it is not known or was reset, false if it cannot be read.
  local function known_record(group, place, id)
    local record = record_of(group.records[place])
    if not record then
      return record
    elseif record.known_until <= now then
      return nil
    elseif record.is_settled or (record.releases and record.expires <= now)
      or call('ZSCORE', KEYS[group.indexes[place]], member_of(record, id)) then
      return record
    end
    return nil
  end

  local function save_record(key, record)
    records[key] = record
    local millis = ceil((record.known_until - now) / 1000) + 1 + (injected and INJECTED_TTL_MS or 0)
    local head = pack(HOLD, record.is_settled and 1 or 0, record.releases and 1 or 0, record.units, record.at, record.expires,
      record.known_until, record.charged, record.excess)
    call('SET', KEYS[key], head .. record.limit_text .. record.answer, 'PX', string.format('%.0f', millis))
  end

  -- Adds a hold to the index, or moves it. The index lives until its last hold leaves; if holds are released, until the counter
  -- is empty as well.
  local function add_to_index(index, record, id, state)
    local leaves, limit, extra = record.releases and record.expires or record.known_until, record.limit, 0
    call('ZADD', KEYS[index], string.format('%.0f', leaves), member_of(record, id))
    if record.releases and limit.code ~= CONCURRENCY then
      extra = limit.algorithm.reset(state, limit)
    end
    index_ttls[index] = max(index_ttls[index] or 0, extra)
  end

  local function remove_from_index(index, record, id)
    index_ttls[index] = index_ttls[index] or 0
    return call('ZREM', KEYS[index], member_of(record, id)) == 1
  end

  function save_hold_indexes()
    for index, extra in pairs(index_ttls) do
      local last = call('ZREVRANGE', KEYS[index], '0', '0', 'WITHSCORES')
      if last[1] == '' then
        call('DEL', KEYS[index]) -- only the counter is left
      elseif last[1] then
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

  -- Releases some expired holds of a counter, and returns how many.
  local function release_expired(key, index, state, limit)
    local members = call('ZRANGEBYSCORE', KEYS[index], '0', string.format('%.0f', now), 'LIMIT', '0', MAX_RELEASED)
    if #members == 0 then
      return 0
    end
    call('ZREM', KEYS[index], unpack(members))
    index_ttls[index] = index_ttls[index] or 0
    for _, member in ipairs(members) do
      if #member >= MEMBER_BYTES then
        local releases, at, units = unpack_from(MEMBER, member)
        if releases == 1 then
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

  -- Answers a check that is not decided, because a key of a tier cannot be read.
  local function reply_unreadable(unreadable)
    for tier = 1, #unreadable do
      replies[#replies + 1] = (unreadable[tier] and UNREADABLE or NO_ANSWER) .. NO_RESULT
    end
  end

  -- Answers a hold whose id is known on one of its counters.
  local function repeat_hold(group, known)
    for tier = 1, group.tiers do
      local record = known[tier]
      if not record then
        reply(NO_ANSWER, NOT_HELD)
      elseif record.is_settled or record.expires <= now or record.units ~= group.costs[tier] then
        reply(NO_ANSWER, CONFLICT, record)
      else
        reply(record.answer, REPEATED, record)
      end
    end
  end

  -- Charges a check and records it as a hold, if it has an id.
  local function charge_held(group, first, passes, released, granted)
    local id = group.ids[first]
    for tier = 1, group.tiers do
      local place, limit, cost = first + tier, group.terms[tier], group.costs[tier]
      local key, index, passed = group.fields[place], group.indexes[place], passes[tier]
      local state, charged, record = states[key], min(granted, passed), nil
      charge(key, state, limit, charged * cost)
      if id ~= '' and charged > 0 then
        local expires = now + group.ttls[first]
        record = { units = cost, at = now, expires = expires, known_until = expires + RETENTION, charged = cost,
          excess = group.excess[tier], releases = group.flags[tier] >= 8, limit = limit, limit_text = group.limit_texts[tier] }
        add_to_index(index, record, id, state)
      end
      local wait = 0
      if passed < group.fields[first] and charged == passed then
        wait = retry(state, limit, cost, group.flags[tier] % KEEP >= OVERDRAFT)
      end
      local text = packed_answer(state, limit, passed, charged, wait, 0)
      if record then
        record.answer = text
        save_record(group.records[place], record)
      end
      reply(text, record and MADE or NOT_HELD, record, released[tier])
    end
  end

  local function hold(group, first, count)
    local id, is_check = group.ids[first], group.operation == CHECK
    local known, unreadable, is_known, is_unreadable = {}, {}, false, false
    for tier = 1, group.tiers do
      local place = first + tier
      local record = nil
      if id ~= '' then
        record = known_record(group, place, id)
      end
      known[tier], is_known = record, is_known or record
      unreadable[tier] = record == false or stored[group.indexes[place]] == ''
        or not state_of(group.fields[place], group.terms[tier])
      is_unreadable = is_unreadable or unreadable[tier]
    end
    if is_unreadable then
      return reply_unreadable(unreadable)
    elseif is_known then
      return repeat_hold(group, known)
    end
    local passes, released, full, is_full, granted = {}, {}, {}, false, is_check and count or 0
    for tier = 1, group.tiers do
      local key, index, limit = group.fields[first + tier], group.indexes[first + tier], group.terms[tier]
      local state, flags = states[key], group.flags[tier]
      released[tier] = is_check and release_expired(key, index, state, limit) or 0
      passes[tier] = passing(limit.capacity - state.used, group.costs[tier], flags % KEEP >= OVERDRAFT, count)
      if flags % 2 < SHADOW then
        granted = min(granted, passes[tier])
      end
      local meta = index == key and 1 or 0
      full[tier] = id ~= '' and call('ZCARD', KEYS[index]) - meta >= MAX_LIVE
      is_full = is_full or full[tier]
    end
    if is_full then
      for tier = 1, group.tiers do
        reply(NO_ANSWER, full[tier] and FULL or NOT_HELD)
      end
      return
    end
    charge_held(group, first, passes, released, granted)
  end

  -- Replaces the estimate of a hold by the actual cost.
  local function settle(key, index, state, record, id, actual, excess)
    local limit, units = record.limit, record.units
    actual = min(actual, units + (excess >= 0 and excess or record.excess), MAX_EXACT)
    local was_charged = remove_from_index(index, record, id)
    if limit.code == CONCURRENCY then
      if was_charged then
        refund(key, state, limit, units, -1)
      end
    elseif not was_charged then
      charge(key, state, limit, actual)
    elseif actual < units then
      refund(key, state, limit, units - actual, record.at)
    else
      charge(key, state, limit, actual - units)
    end
    record.is_settled, record.charged, record.known_until = true, actual, now + RETENTION
  end

  -- Settles, renews or takes back the hold of one counter.
  local function adjust_hold(group, first, tier, record)
    local place, id, operation = first + tier, group.ids[first], group.operation
    local key, index, record_key = group.fields[place], group.indexes[place], group.records[place]
    if not record or (operation == TAKE_BACK and record.is_settled) then
      return reply(NO_ANSWER, UNKNOWN)
    elseif record.is_settled then
      return reply(NO_ANSWER, ALREADY, record)
    end
    local limit, state, is_late = record.limit, state_of(key, record.limit), record.expires <= now
    local outcome = is_late and LATE or SETTLED
    if operation == SETTLE then
      local is_kept = group.flags[tier] % 8 >= KEEP
      settle(key, index, state, record, id, is_kept and record.units or group.costs[tier], group.excess[tier])
      save_record(record_key, record)
    elseif operation == RENEW then
      if is_late then
        return reply(NO_ANSWER, LATE, record)
      end
      record.expires = max(record.expires, now + group.ttls[first])
      record.known_until, outcome = record.expires + RETENTION, RENEWED
      add_to_index(index, record, id, state)
      save_record(record_key, record)
    else
      if remove_from_index(index, record, id) then
        refund(key, state, limit, record.units, record.at)
      end
      call('DEL', KEYS[record_key])
      records[record_key], stored[record_key], outcome = nil, false, SETTLED
    end
    reply(packed_answer(state, limit, 1, 0, 0, 0), outcome, record)
  end

  local function adjust(group, first)
    local known, unreadable, is_unreadable = {}, {}, false
    for tier = 1, group.tiers do
      local place = first + tier
      local record = known_record(group, place, group.ids[first])
      known[tier] = record
      unreadable[tier] = record == false or stored[group.indexes[place]] == ''
        or (record and not state_of(group.fields[place], record.limit)) or false
      is_unreadable = is_unreadable or unreadable[tier]
    end
    if is_unreadable then
      return reply_unreadable(unreadable)
    end
    for tier = 1, group.tiers do
      adjust_hold(group, first, tier, known[tier])
    end
  end

  function decide_held(group, first, count)
    if group.operation <= PEEK then
      hold(group, first, count)
    else
      adjust(group, first)
    end
  end
end
