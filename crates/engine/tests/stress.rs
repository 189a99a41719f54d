//! Several processes, one store that fails at random, callers that go away at random: nothing happens twice.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests")]

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::*;
use onlyonce_core::{MemoryStore, OnLeaseEnd, StoreErrorKind};
use onlyonce_engine::{Begin, Completed, Execution, Idempotency};
use parking_lot::Mutex;

const KEYS: u64 = 400;
const CALLERS: usize = 12;
const ENGINES: usize = 3;
const ROUNDS: u64 = 250;

/// A small generator with a seed that can be printed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }
}

/// What the world outside saw.
#[derive(Default)]
struct World {
    effects: Mutex<HashMap<u64, Vec<String>>>,
    answers: Mutex<HashMap<u64, Vec<Vec<u8>>>>,
    acquired: Mutex<HashMap<u64, u32>>,
    next_effect: AtomicU64,
}

impl World {
    fn happen(&self, key: u64) -> String {
        let effect = format!("effect {}", self.next_effect.fetch_add(1, Ordering::SeqCst));
        self.effects.lock().entry(key).or_default().push(effect.clone());
        effect
    }

    fn answered(&self, key: u64, body: &[u8]) {
        self.answers.lock().entry(key).or_default().push(body.to_vec());
    }
}

fn key_operation(key: u64) -> onlyonce_core::Operation {
    operation(&key.to_string(), "x")
}

async fn call(idem: Idempotency, world: Arc<World>, key: u64, way: u64) {
    let execution = match idem.begin(&key_operation(key)).await {
        Ok(Begin::Acquired(execution)) => execution,
        Ok(Begin::Completed(stored)) => return world.answered(key, stored.reply.body()),
        Ok(Begin::Mismatch { .. }) => panic!("there is one fingerprint"),
        Ok(Begin::InProgress { .. } | Begin::Unknown { .. }) | Err(_) => return,
    };
    *world.acquired.lock().entry(key).or_default() += 1;
    work(execution, &world, key, way).await;
}

async fn work(execution: Execution, world: &World, key: u64, way: u64) {
    let pause = Duration::from_millis(way % 7);
    match way % 10 {
        0 | 1 => return execution.release().await,
        2 => return,
        _ => tokio::time::sleep(pause).await,
    }
    let effect = world.happen(key);
    tokio::time::sleep(pause).await;
    match way % 10 {
        3 => execution.unknown().await,
        4 => drop(execution),
        5 => drop(execution.complete(body(effect))),
        _ => match execution.complete(body(effect)).await {
            Completed::Recorded(stored) | Completed::Fenced(Some(stored)) => {
                world.answered(key, stored.reply.body());
            }
            Completed::Fenced(None) | Completed::NotRecorded(_) => {}
        },
    }
}

/// Breaks one store in one way for a few calls, again and again.
async fn chaos(stores: Vec<FaultyStore>, mut dice: Dice, stop: Arc<AtomicBool>) -> u64 {
    use Method::*;
    let mut injected = 0;
    while !stop.load(Ordering::SeqCst) {
        let store = &stores[dice.roll(ENGINES as u64) as usize];
        let method = [Claim, Claim, Renew, Complete, Release, MarkUnknown][dice.roll(6) as usize];
        let fault = match dice.roll(7) {
            0 => Fault::Refuse(StoreErrorKind::Unavailable),
            1 => Fault::Refuse(StoreErrorKind::Internal),
            2 => Fault::LoseRequest,
            3 => Fault::LoseAnswer,
            4 => Fault::HangAfter,
            5 => Fault::Late(ms(dice.roll(60))),
            _ => Fault::LateAnswer(ms(dice.roll(60))),
        };
        store.fail(method, 1 + dice.roll(4) as usize, fault);
        injected += 1;
        tokio::time::sleep(ms(1 + dice.roll(4))).await;
    }
    injected
}

async fn storm(policy: OnLeaseEnd, lease: Duration) -> (Arc<World>, Vec<FaultyStore>, Vec<Idempotency>) {
    let seed = onlyonce_core::clock::unix_ms(std::time::SystemTime::now()) as u64;
    let records = MemoryStore::new();
    let stores: Vec<_> = (0..ENGINES).map(|_| FaultyStore::onto(&records)).collect();
    let build = |store: &FaultyStore| {
        let builder = brief(store, lease).on_lease_end(policy).max_attempts(1000);
        builder.wait(ms(30)).store_timeout(ms(120)).build()
    };
    let engines: Vec<_> = stores.iter().map(build).collect();
    let (world, stop) = (Arc::new(World::default()), Arc::new(AtomicBool::new(false)));
    let storm = tokio::spawn(chaos(stores.clone(), Dice(seed), stop.clone()));
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (engines, world) = (engines.clone(), world.clone());
            let mut dice = Dice(seed ^ (caller as u64 + 1) << 40);
            tokio::spawn(async move {
                let mut gone = 0;
                for round in 0..ROUNDS {
                    let idem = engines[dice.roll(ENGINES as u64) as usize].clone();
                    // Few keys are hot at a time, so that callers meet; some are asked for again much later.
                    let hot = (round * KEYS / ROUNDS + dice.roll(8)) % KEYS;
                    let key = if dice.roll(8) == 0 { dice.roll(hot + 1) } else { hot };
                    let call = call(idem, world.clone(), key, dice.roll(1000));
                    // One in three goes away at some moment.
                    let patience = if dice.roll(3) == 0 { ms(dice.roll(25)) } else { PATIENCE };
                    let ended = tokio::time::timeout(patience, call).await;
                    gone += u64::from(ended.is_err());
                }
                gone
            })
        })
        .collect();
    let mut gone = 0;
    for caller in callers {
        gone += caller.await.unwrap();
    }
    stop.store(true, Ordering::SeqCst);
    let injected = storm.await.unwrap();
    stores.iter().for_each(FaultyStore::heal);
    for idem in &engines {
        all_given_back(idem).await;
    }
    let effects: usize = world.effects.lock().values().map(Vec::len).sum();
    let answers: usize = world.answers.lock().values().map(Vec::len).sum();
    println!("seed {seed}: {effects} effects, {answers} answers, {gone} callers gone, {injected} faults");
    assert!(effects > 20 && answers > 100 && gone > 50 && injected > 100, "the storm blew");
    (world, stores, engines)
}

/// All answers of one key are one, and it is that of an effect.
async fn answers_agree(world: &World, engines: &[Idempotency]) {
    for key in 0..KEYS {
        let mut answers = world.answers.lock().get(&key).cloned().unwrap_or_default();
        let known = answers.len();
        for idem in engines {
            match idem.begin(&key_operation(key)).await.unwrap() {
                Begin::Completed(stored) => answers.push(stored.reply.body().to_vec()),
                Begin::Acquired(execution) => execution.release().await,
                _ => {}
            }
        }
        assert!(known == 0 || answers.len() > known, "key {key} was answered and is forgotten");
        let Some(first) = answers.first() else { continue };
        assert!(answers.iter().all(|answer| answer == first), "key {key}: {answers:?}");
        let effects = world.effects.lock();
        let effects = effects.get(&key).map_or(&[][..], Vec::as_slice);
        assert!(effects.iter().any(|effect| effect.as_bytes() == first), "key {key}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn under_hold_nothing_happens_twice_whatever_fails() {
    let (world, stores, engines) = storm(OnLeaseEnd::Hold, ms(900)).await;
    for (key, effects) in world.effects.lock().iter() {
        assert_eq!(effects.len(), 1, "key {key} happened more than once: {effects:?}");
    }
    answers_agree(&world, &engines).await;
    // What never ran is left held by nobody, whatever became of its claims.
    let fresh = engine(&FaultyStore::onto(stores[0].records())).build();
    for key in 0..KEYS {
        if world.acquired.lock().contains_key(&key) {
            continue;
        }
        begin_until(&fresh, &key_operation(key), |begin| matches!(begin, Begin::Acquired(_))).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn under_takeover_all_answers_agree_whatever_fails() {
    let (world, _stores, engines) = storm(OnLeaseEnd::TakeOver, ms(300)).await;
    answers_agree(&world, &engines).await;
    let takeovers: u64 = engines.iter().map(|idem| idem.counts().takeovers).sum();
    assert!(takeovers > 0, "there were takeovers");
}
