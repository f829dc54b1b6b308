
-- token-bucket: the level in parts of a unit. See ../token_bucket.lua.
if is_used[TOKEN_BUCKET] then
  read[TOKEN_BUCKET] = function(key, limit)
    local raw = stored[key]
    if not raw then
      return 0
    elseif #raw ~= BUCKET_BYTES then
      return false
    end
    local last, whole, part, units, micros, ttl_until = unpack_from('<dddddd', raw)
    local level = whole * micros + part
    if not (units == limit.units and micros == limit.micros and last <= now and level < MAX_FAST and last >= 0
      and whole >= 0 and part >= 0 and ttl_until >= 0 and ttl_until <= MAX_TTL_END
      and (last + ttl_until) % 1 == 0 and (whole + part) % 1 == 0) then
      return false
    end
    stored_ttl[key] = ttl_until
    level = level - (now - last) * units
    return level > 0 and level or 0
  end

  write[TOKEN_BUCKET] = function(key, limit, level)
    local units, micros = limit.units, limit.micros
    local drained, part = level + units - 1, level % micros
    local ttl_until, millis = renewed_ttl(stored_ttl[key] or 0, limit.window, (drained - drained % units) / units)
    if ttl_until then
      call('SET', KEYS[key], pack('<dddddd', now, (level - part) / micros, part, units, micros, ttl_until), 'PX', millis)
    else
      call('SETRANGE', KEYS[key], '0', pack('<ddd', now, (level - part) / micros, part))
    end
  end
end
