//! The keys of a run and their distribution. The names are unique to the run, so that no other counter is touched.

use rand::{Rng, distr::Distribution, rngs::SmallRng};
use rand_distr::Zipf;

use super::limit_verifier::KeyNumber;

/// The keys of one run.
#[derive(Clone, Debug)]
pub(super) struct KeySpace {
    /// A random number that makes the names unique.
    run: u64,
    count: u32,
    /// The distribution of requests; uniform if none.
    zipf: Option<Zipf<f64>>,
}

impl KeySpace {
    pub(super) fn new(count: u32, exponent: Option<f64>) -> Result<Self, String> {
        let zipf = exponent.map(|exponent| Zipf::new(count.into(), exponent)).transpose();
        let zipf = zipf.map_err(|error| format!("--zipf: {error}"))?;
        Ok(Self { run: rand::random(), count, zipf })
    }

    /// Draws the next key.
    pub(super) fn next(&self, random: &mut SmallRng) -> KeyNumber {
        match &self.zipf {
            _ if self.count == 1 => 0,
            None => random.random_range(0..self.count),
            Some(zipf) => {
                // ranks are whole numbers from 1
                let rank = zipf.sample(random);
                (rank as u32).clamp(1, self.count) - 1
            }
        }
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    pub(super) fn name(&self, key: KeyNumber) -> String {
        format!("{}{key}", self.prefix())
    }

    /// The common prefix of all keys.
    pub(super) fn prefix(&self) -> String {
        format!("sluicegate-bench:{:016x}:", self.run)
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn counts(count: u32, exponent: Option<f64>) -> Vec<u32> {
        let keys = KeySpace::new(count, exponent).unwrap();
        let mut random = SmallRng::seed_from_u64(7);
        let mut counts = vec![0; count as usize];
        for _ in 0..100_000 {
            counts[keys.next(&mut random) as usize] += 1;
        }
        counts
    }

    #[test]
    fn keys_are_drawn_by_the_given_distribution() {
        assert_eq!(counts(1, None), [100_000]);
        assert!(counts(10, None).iter().all(|count| (9_000..11_000).contains(count)));
        let uneven = counts(10, Some(1.0));
        // the second key half as often as the first, the third a third
        assert!((1.8..2.2).contains(&(f64::from(uneven[0]) / f64::from(uneven[1]))), "{uneven:?}");
        assert!((2.7..3.3).contains(&(f64::from(uneven[0]) / f64::from(uneven[2]))), "{uneven:?}");
    }

    #[test]
    fn no_two_runs_share_a_key() {
        let (one, two) = (KeySpace::new(1, None).unwrap(), KeySpace::new(1, None).unwrap());
        assert_ne!(one.name(0), two.name(0));
        assert!(KeySpace::new(10, Some(-1.0)).is_err());
    }
}
