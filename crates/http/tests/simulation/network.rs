//! Time, chance, and everything that travels: the only things that the parts of a simulation share.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use onlyonce_core::{Clock, clock};
use onlyonce_engine::Random as Randomness;
use onlyonce_prove::{Fault, Random};
use parking_lot::Mutex;

use crate::process::Process;

/// What happens when something arrives.
pub(crate) type Event = Box<dyn FnOnce(&mut [Process]) + Send>;

/// The network, the clock on every wall, and the dice.
#[derive(Clone)]
pub(crate) struct Network(Arc<Mutex<State>>);

struct State {
    now_ms: u64,
    random: Random,
    // What is under way, by the time of its arrival. What arrives in one millisecond arrives in an order of chance.
    under_way: BTreeMap<(u64, u64, u64), Event>,
    sent: u64,
    links: Vec<LinkState>,
    counts: BTreeMap<Fault, usize>,
    purged: u64,
    healed: bool,
    // Whoever waits for one of these waits for ever.
    lost: Vec<Box<dyn Any + Send>>,
}

/// Between one gateway and the store; each trouble lasts until then.
#[derive(Clone, Copy, Debug, Default)]
struct LinkState {
    refused_until_ms: u64,
    silent_until_ms: u64,
    slow_until_ms: u64,
}

/// What becomes of one call to the store.
pub(crate) enum Fate {
    /// It is not even sent.
    Refused,
    /// It is sent, and nothing is ever heard of it.
    Swallowed,
    /// It arrives.
    Carried { there_ms: u64, back: Back },
}

/// What becomes of an answer.
pub(crate) enum Back {
    Arrives { after_ms: u64 },
    Breaks { after_ms: u64 },
    Never,
}

impl Network {
    pub(crate) fn new(random: Random, links: usize) -> Self {
        Self(Arc::new(Mutex::new(State {
            now_ms: 1_000_000,
            random,
            under_way: BTreeMap::new(),
            sent: 0,
            links: vec![LinkState::default(); links],
            counts: BTreeMap::new(),
            purged: 0,
            healed: false,
            lost: Vec::new(),
        })))
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.0.lock().now_ms
    }

    pub(crate) fn tick(&self) -> u64 {
        let mut state = self.0.lock();
        state.now_ms += 1;
        state.now_ms
    }

    pub(crate) fn draw<T>(&self, draw: impl FnOnce(&mut Random) -> T) -> T {
        draw(&mut self.0.lock().random)
    }

    /// Lets something arrive after that long, 0 being this very millisecond.
    pub(crate) fn after(&self, delay_ms: u64, event: Event) {
        let mut state = self.0.lock();
        let (chance, sent) = (state.random.draw(), state.sent);
        state.sent += 1;
        let at = state.now_ms + delay_ms;
        state.under_way.insert((at, chance, sent), event);
    }

    /// What has arrived by now, one at a time.
    pub(crate) fn arrival(&self) -> Option<Event> {
        let mut state = self.0.lock();
        let now_ms = state.now_ms;
        let first = state.under_way.first_entry()?;
        (first.key().0 <= now_ms).then(|| first.remove())
    }

    /// Keeps what somebody waits for, and never gives it to them.
    pub(crate) fn lose(&self, what: impl Any + Send) {
        self.0.lock().lost.push(Box::new(what));
    }

    pub(crate) fn count(&self, fault: Fault) {
        *self.0.lock().counts.entry(fault).or_default() += 1;
    }

    pub(crate) fn counts(&self) -> BTreeMap<Fault, usize> {
        self.0.lock().counts.clone()
    }

    pub(crate) fn note_purged(&self, records: u64) {
        self.0.lock().purged += records;
    }

    pub(crate) fn purged(&self) -> u64 {
        self.0.lock().purged
    }

    pub(crate) fn is_healed(&self) -> bool {
        self.0.lock().healed
    }

    pub(crate) fn heal(&self) {
        let mut state = self.0.lock();
        state.healed = true;
        state.links.fill(LinkState::default());
    }

    /// Breaks the way of one gateway to the store for a while: it is refused, or nothing comes back.
    pub(crate) fn cut(&self, link: usize, silently: bool, for_ms: u64) {
        let mut state = self.0.lock();
        let until_ms = state.now_ms + for_ms;
        match silently {
            true => state.links[link].silent_until_ms = until_ms,
            false => state.links[link].refused_until_ms = until_ms,
        }
    }

    pub(crate) fn slow_down(&self, link: usize, for_ms: u64) {
        let mut state = self.0.lock();
        state.links[link].slow_until_ms = state.now_ms + for_ms;
    }

    /// What becomes of the next call from this gateway to the store.
    pub(crate) fn fate(&self, link: usize) -> Fate {
        let mut state = self.0.lock();
        let (now_ms, healed) = (state.now_ms, state.healed);
        let its = state.links[link];
        let random = &mut state.random;
        let mut there_ms = random.draw() % 4;
        let mut after_ms = random.draw() % 3;
        if its.slow_until_ms > now_ms {
            there_ms += random.draw() % 120;
            after_ms += random.draw() % 60;
        }
        let (chance, percent) = (random.draw() % 100, random.percent(50));
        if healed {
            return Fate::Carried { there_ms, back: Back::Arrives { after_ms } };
        }
        if its.refused_until_ms > now_ms {
            return Fate::Refused;
        }
        if its.silent_until_ms > now_ms {
            return if percent { Fate::Swallowed } else { Fate::Carried { there_ms, back: Back::Never } };
        }
        match chance {
            0 => Fate::Refused,
            1 => Fate::Swallowed,
            2..4 => {
                *state.counts.entry(Fault::LoseReply).or_default() += 1;
                let back = if percent { Back::Breaks { after_ms } } else { Back::Never };
                Fate::Carried { there_ms, back }
            }
            // One that went astray, and arrives when nobody thinks of it any more.
            4 => Fate::Carried { there_ms: there_ms + random.draw() % 600, back: Back::Arrives { after_ms } },
            _ => Fate::Carried { there_ms, back: Back::Arrives { after_ms } },
        }
    }
}

impl std::fmt::Debug for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Network")
    }
}

impl Clock for Network {
    fn boot(&self) -> Duration {
        Duration::from_millis(self.now_ms())
    }

    fn wall(&self) -> SystemTime {
        clock::from_unix_ms(1_767_225_600_000) + self.boot()
    }
}

impl Randomness for Network {
    fn fill(&self, bytes: &mut [u8]) {
        let mut state = self.0.lock();
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&state.random.draw().to_le_bytes()[..chunk.len()]);
        }
    }
}
