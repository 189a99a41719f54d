//! Numbers from a seed: the same seed, the same experiment.

use std::time::Duration;

/// SplitMix64 (Steele, Lea, Flood 2014): small, and each fork is a stream of its own.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A stream of its own for each `name`, whatever the others draw.
    pub fn fork(&self, name: u64) -> Self {
        let mut fork = Self(self.0 ^ name.wrapping_mul(0xd134_2543_de82_ef95));
        fork.draw();
        fork
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.draw() % bound as u64).unwrap_or(0)
    }

    /// True that often in a hundred.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.draw() % 100 < percent
    }

    /// From `least` to `most`, in microseconds.
    pub fn between(&mut self, least: Duration, most: Duration) -> Duration {
        let span = u64::try_from(most.saturating_sub(least).as_micros()).unwrap_or(u64::MAX - 1);
        least + Duration::from_micros(self.draw() % (span + 1))
    }

    /// One of these, if there is any.
    pub(crate) fn pick_if_any<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        (!of.is_empty()).then(|| self.pick(of))
    }

    /// One of these, of which there is one at least.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_the_same_numbers_and_a_fork_is_others() {
        let draw = |mut random: Random| [random.draw(), random.draw(), random.draw()];
        // The reference values of SplitMix64 for the seed 1234567.
        assert_eq!(
            draw(Random::new(1_234_567)),
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
        assert_eq!(draw(Random::new(7).fork(1)), draw(Random::new(7).fork(1)));
        assert_ne!(draw(Random::new(7).fork(1)), draw(Random::new(7).fork(2)));
    }
}
