//! A [`Hammer`] as a command line.

use std::time::Duration;

use sluicegate::{Algorithm, Limit};

use super::{Hammer, SkewedClock, Workload};

impl Hammer {
    pub(super) fn to_args(&self) -> Vec<String> {
        let mut args = vec![
            format!("--url={}", self.url),
            format!("--limit={}", limit_text(&self.limit)),
            format!("--callers={}", self.callers),
            match self.workload {
                Workload::Calls(calls) => format!("--calls={calls}"),
                Workload::Time(time) => format!("--millis={}", time.as_millis()),
            },
        ];
        args.extend(self.keys.iter().map(|key| format!("--key={key}")));
        args.extend(self.costs.iter().map(|cost| format!("--cost={cost}")));
        if let Some((name, limit)) = &self.user {
            args.extend([format!("--user={name}"), format!("--user-limit={}", limit_text(limit))]);
        }
        args.extend(self.clock.iter().map(|clock| format!("--clock={}", clock.text())));
        args
    }

    /// Parses a command line:
    ///
    /// ```text
    /// --url=URL --limit=ALGORITHM:AMOUNT:WINDOW_MS[:BURST][@LEASE_UNITS:LIFETIME_MS] --key=KEY... --cost=COST... --callers=COUNT
    /// (--calls=COUNT | --millis=TIME) [--user=NAME --user-limit=LIMIT] [--clock=OFFSET:SPEED]
    /// ```
    ///
    /// # Errors
    ///
    /// When an argument is unknown, invalid or missing.
    pub fn from_args(args: impl IntoIterator<Item = String>) -> Result<Hammer, String> {
        let (mut url, mut limit, mut callers, mut workload) = (None, None, None, None);
        let (mut user, mut user_limit, mut clock) = (None, None, None);
        let (mut keys, mut costs) = (Vec::new(), Vec::new());
        for arg in args {
            let (name, value) = arg.split_once('=').ok_or_else(|| format!("{arg}: not --name=value"))?;
            let number = || value.parse::<u64>().map_err(|error| format!("{arg}: {error}"));
            match name {
                "--url" => url = Some(value.to_owned()),
                "--limit" => limit = Some(parse_limit(value)?),
                "--key" => keys.push(value.to_owned()),
                "--cost" => costs.push(number()?),
                "--callers" => callers = usize::try_from(number()?).ok(),
                "--calls" => workload = Some(Workload::Calls(number()?)),
                "--millis" => workload = Some(Workload::Time(Duration::from_millis(number()?))),
                "--user" => user = Some(value.to_owned()),
                "--user-limit" => user_limit = Some(parse_limit(value)?),
                "--clock" => {
                    let parsed = SkewedClock::parse(value);
                    clock = Some(parsed.ok_or_else(|| format!("{arg}: not OFFSET:SPEED"))?);
                }
                _ => return Err(format!("{arg}: unknown argument")),
            }
        }
        if keys.is_empty() || costs.is_empty() || user.is_some() != user_limit.is_some() {
            return Err("needs --key and --cost, and --user together with --user-limit".to_owned());
        }
        Ok(Hammer {
            url: url.ok_or("needs --url")?,
            limit: limit.ok_or("needs --limit")?,
            keys,
            user: user.zip(user_limit),
            costs,
            callers: callers.ok_or("needs --callers")?,
            workload: workload.ok_or("needs --calls or --millis")?,
            clock,
        })
    }
}

fn limit_text(limit: &Limit) -> String {
    let mut text = format!("{}:{}:{}", limit.algorithm(), limit.amount(), limit.window().as_millis());
    if limit.algorithm() == Algorithm::TokenBucket {
        text += &format!(":{}", limit.capacity());
    }
    if let Some(lease) = limit.lease() {
        text += &format!("@{}:{}", lease.units(), lease.lifetime().as_millis());
    }
    text
}

fn parse_limit(text: &str) -> Result<Limit, String> {
    let wrong = |reason: &dyn std::fmt::Display| format!("limit {text:?}: {reason}");
    let number = |part: &str| part.parse::<u64>().map_err(|error| wrong(&error));
    if let Some((limit, lease)) = text.split_once('@') {
        let (units, millis) = lease.split_once(':').ok_or_else(|| wrong(&"use @UNITS:LIFETIME_MS"))?;
        let lifetime = Duration::from_millis(number(millis)?);
        return parse_limit(limit)?.with_lease(number(units)?, lifetime).map_err(|error| wrong(&error));
    }
    let parts: Vec<&str> = text.split(':').collect();
    let (algorithm, amount, window, burst) = match *parts {
        [algorithm, amount, window] => (algorithm, amount, window, None),
        [algorithm, amount, window, burst] => (algorithm, amount, window, Some(burst)),
        _ => return Err(wrong(&"use ALGORITHM:AMOUNT:WINDOW_MS[:BURST]")),
    };
    let algorithm = algorithm.parse().map_err(|error| wrong(&error))?;
    let window = Duration::from_millis(number(window)?);
    let limit = Limit::new(algorithm, number(amount)?, window).map_err(|error| wrong(&error))?;
    match burst {
        Some(burst) => limit.with_burst(number(burst)?).map_err(|error| wrong(&error)),
        None => Ok(limit),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_command_line_round_trips_a_hammer() {
        let bucket = Limit::token_bucket(7, SECOND).unwrap().with_burst(3).unwrap();
        let plain = Hammer {
            url: "redis://127.0.0.1:1".to_owned(),
            limit: Limit::sliding_log(100, Duration::from_millis(1)).unwrap(),
            keys: vec!["a".to_owned(), "b=c".to_owned()],
            user: None,
            costs: vec![1, 5],
            callers: 3,
            workload: Workload::Calls(9),
            clock: None,
        };
        let leased = plain.limit.with_lease(5, Duration::from_millis(1)).unwrap();
        let tiered = Hammer {
            limit: leased,
            user: Some(("me".to_owned(), bucket)),
            workload: Workload::Time(SECOND),
            clock: Some(SkewedClock { offset_seconds: -5, seconds_in_ten: 3 }),
            ..plain.clone()
        };
        for hammer in [plain, tiered] {
            assert_eq!(Hammer::from_args(hammer.to_args()), Ok(hammer.clone()));
            let mut args = hammer.to_args();
            args.remove(0);
            assert_eq!(Hammer::from_args(args), Err("needs --url".to_owned()));
        }
        assert!(parse_limit("sliding-log:1").is_err() && parse_limit("sliding-log:1:1:1").is_err());
    }
}
