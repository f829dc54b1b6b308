
-- Leases: units that processes have charged in advance and not spent yet. Each counter has a record of them under another key of
-- its slot: '<d', the time since which it exists, and up to MAX_LEASE_ENTRIES '<dd', when the entry expires and its units. Leases that
-- expire at about the same time share an entry, so that the size of a record does not depend on the number of processes.
--
-- A process ends a lease by the time at which it was drawn. If the record is younger than that (it was reset or lost), nothing is
-- changed, because the counter does not contain the lease either.
local leased_units, draw, end_lease, save_lease_records, read_leased_group

if has_leases then
  local LEASE_ENTRY, MAX_LEASE_ENTRIES = '<dd', 8
  -- At least this part of the further requests is charged, or none: 1 / LEAST_DRAW.
  local LEAST_DRAW = 8
  local lease_records, changed_records = {}, {}

  local function lease_record(key)
    local record = lease_records[key]
    if record then
      return record
    end
    record = { since = now, units = 0, entries = {}, is_readable = true }
    lease_records[key] = record
    local raw = stored[key]
    if not raw then
      return record
    elseif #raw % 16 ~= 8 or #raw > 8 + 16 * MAX_LEASE_ENTRIES then
      record.is_readable = false
      return record
    end
    local at = 9
    record.since = min(unpack_from('<d', raw), now) -- the clock may have been set back
    record.is_readable = record.since >= 0 and record.since <= MAX_STORED
    while at <= #raw do
      local expires, units
      expires, units, at = unpack_from(LEASE_ENTRY, raw, at)
      -- comparisons are false for a number that is not a number
      if not (expires >= 0 and expires <= MAX_TTL_END and units >= 0 and units <= MAX_STORED) then
        record.is_readable = false
      elseif expires > now then
        record.entries[#record.entries + 1] = { expires = expires, units = units }
        record.units = record.units + units
      end
    end
    return record
  end

  -- Returns when a lease that was drawn at `time` expires, rounded up to a quarter of its lifetime.
  local function lease_expiry(time, lifetime)
    local quarter = ceil(lifetime / 4)
    local expires = time + lifetime + quarter - 1
    return expires - expires % quarter
  end

  local function add_to_record(record, units, lifetime)
    local entries, expires = record.entries, lease_expiry(now, lifetime)
    record.units = record.units + units
    for _, entry in ipairs(entries) do
      if entry.expires == expires then
        entry.units = entry.units + units
        return
      end
    end
    if #entries < MAX_LEASE_ENTRIES then
      entries[#entries + 1] = { expires = expires, units = units }
      table.sort(entries, function(one, other)
        return one.expires < other.expires
      end)
      return
    end
    local last = entries[#entries]
    last.expires, last.units = max(last.expires, expires), last.units + units
  end

  -- Removes up to `units` of leases that expire at `expires` or later, the earliest first, and returns how many.
  local function remove_from_record(record, units, expires)
    local removed = 0
    for _, entry in ipairs(record.entries) do
      if entry.expires >= expires then
        local part = min(entry.units, units - removed)
        entry.units, removed = entry.units - part, removed + part
      end
    end
    record.units = record.units - removed
    return removed
  end

  -- Returns the leased units of a tier; `place` is its index in the fields of the group.
  function leased_units(group, place)
    local key = group.records[place]
    return key > 0 and lease_record(key).units or 0
  end

  -- Charges further requests of a check in advance, and returns how many: not more than the check asks for, than the lease of each
  -- limit allows, or than half of the free units, so that other processes find some. The caller charges them.
  function draw(group, first, free)
    local drawn = group.lease_counts[first]
    if drawn == 0 then
      return 0
    end
    for tier = 1, group.tiers do
      local cost, record = group.costs[tier], lease_record(group.records[first + tier])
      if not record.is_readable then
        return 0
      elseif cost > 0 then
        drawn = min(drawn, floor((group.most_leased[tier] - record.units) / cost), floor(free[tier] / (2 * cost)))
      end
    end
    -- a small part of what the process needs is not worth a lease
    if drawn <= 0 or drawn * LEAST_DRAW < group.lease_counts[first] then
      return 0
    end
    for tier = 1, group.tiers do
      if group.costs[tier] > 0 then
        local key = group.records[first + tier]
        add_to_record(lease_records[key], drawn * group.costs[tier], group.lifetimes[tier])
        changed_records[key] = group.lifetimes[tier]
      end
    end
    return drawn
  end

  -- Ends a lease of one counter: removes its spent and unspent units from the record, and returns how many unspent ones must be
  -- refunded.
  function end_lease(group, first)
    local key, lifetime = group.records[first + 1], group.lifetimes[1]
    local record, expires = lease_record(key), lease_expiry(group.time, lifetime)
    if not record.is_readable or record.since > group.time or expires <= now then
      return 0
    end
    local spent, unspent = group.lease_counts[first], group.fields[first]
    local removed = remove_from_record(record, spent + unspent, expires)
    if removed > 0 then
      changed_records[key] = lifetime
    end
    return max(removed - spent, 0)
  end

  function save_lease_records()
    for key, lifetime in pairs(changed_records) do
      local record, expires = lease_records[key], now + lifetime
      local parts = { pack('<d', record.since) }
      for _, entry in ipairs(record.entries) do
        if entry.units > 0 then
          parts[#parts + 1], expires = pack(LEASE_ENTRY, entry.expires, entry.units), max(expires, entry.expires)
        end
      end
      local millis = ceil((expires - now) / 1000) + 1 + (injected and INJECTED_TTL_MS or 0)
      call('SET', KEYS[key], table.concat(parts), 'PX', string.format('%.0f', millis))
    end
  end

  -- Reads a group with leases. Its `fields` have the same layout as those of other groups. `lease_counts` are the second counts of
  -- the checks, and `records` the lease records of the tiers, by the same indexes.
  function read_leased_group(group, position)
    group.most_leased, group.lifetimes, group.lease_counts, group.records, group.fields = {}, {}, {}, {}, {}
    local tiers, fields, index = group.tiers, group.fields, nil
    for tier = 1, tiers do
      group.flags[tier], index, group.costs[tier], position = unpack_from(TIER, plan, position)
      group.terms[tier] = limits[index]
      group.most_leased[tier], group.lifetimes[tier], position = unpack_from('<dd', plan, position)
    end
    for _ = 1, group.checks do
      local first = #fields + 1
      fields[first], group.lease_counts[first], position = unpack_from('<I4I4', plan, position)
      for tier = 1, tiers do
        fields[first + tier], group.records[first + tier], position = unpack_from('<HH', plan, position)
      end
    end
  end
end
