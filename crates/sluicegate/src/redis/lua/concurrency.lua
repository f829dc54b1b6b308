
-- concurrency: the units of live holds. The key is the index of the holds (hold.lua), in which the empty member stands for the
-- counter: its score is -1 less the units, so that it comes before every hold.
define[CONCURRENCY] = function()
  local self = {}

  function self.load(raw, name)
    local used = raw and tonumber(raw)
    used = used and -1 - used or (raw and -1 or 0)
    return used >= 0 and used % 1 == 0 and { used = used, name = name } or nil
  end

  function self.view() end

  function self.charge(state, _, units)
    state.used = state.used + min(units, MAX_EXACT - state.used)
  end

  -- an upper bound, because a hold that is settled earlier frees its units at once
  function self.wait(state)
    local first = call('ZRANGEBYSCORE', state.name, '0', '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
    return first[2] and max(tonumber(first[2]) - now, 1) or 1
  end

  function self.reset(state)
    if state.used == 0 then
      return 0, 0
    end
    local last = call('ZREVRANGE', state.name, '0', '0', 'WITHSCORES')
    return last[2] and max(tonumber(last[2]) - now, 1) or 1, 0
  end

  function self.refund(state, _, units)
    local refunded = min(units, state.used)
    state.used = state.used - refunded
    return refunded > 0
  end

  function self.own_limit(_, limit)
    return limit.window, limit.phase, limit.units, limit.micros
  end

  -- save_hold_indexes sets the TTL
  function self.save(key, state)
    call('ZADD', key, string.format('%.0f', -1 - state.used), '')
  end

  return self
end
