//! The story, part by part: what is sent, what happens, and whether the figure is as it must be.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use tokio::signal::unix::{SignalKind, signal};

use super::child::{Gateway, GatewayOptions};
use super::payment_api::{PaymentApi, START_BALANCE};
use super::wire::{Answer, Pay, balance, pay};

const BOLD: Style = Style::new().bold();
const DIM: Style = Style::new().dimmed();
const GOOD: Style = AnsiColor::Green.on_default().bold();
const BAD: Style = AnsiColor::Red.on_default().bold();
const BAIT: Style = AnsiColor::Yellow.on_default().bold();

const AMOUNT: i64 = 100;
const COPIES: usize = 20;
const LEASE_S: u64 = 3;

pub(crate) struct Story {
    api: PaymentApi,
    listen: SocketAddr,
    store: PathBuf,
    unguarded: bool,
    gateway: Option<Gateway>,
    wrong: usize,
}

impl Story {
    pub(crate) fn new(api: PaymentApi, listen: SocketAddr, folder: &Path, unguarded: bool) -> Self {
        Self { api, listen, store: folder.join("onlyonce.db"), unguarded, gateway: None, wrong: 0 }
    }

    /// Tells it all; false when a figure was not as it must be.
    pub(crate) async fn tell(&mut self) -> Result<bool> {
        self.without_protection().await?;
        self.api.reset();
        self.start_gateway().await?;
        self.twice().await?;
        self.at_once().await?;
        self.another_amount().await?;
        self.no_key().await?;
        self.killed().await?;
        line("");
        match self.wrong {
            0 => line(format_args!(
                "{GOOD}Every figure is as it must be.{GOOD:#} Sent many times, it happened only once."
            )),
            wrong => line(format_args!("{BAD}{wrong} figure(s) are not as they must be.{BAD:#}")),
        }
        Ok(self.wrong == 0)
    }

    async fn without_protection(&mut self) -> Result<()> {
        let api = self.api.address;
        part(1, "No protection");
        note(format_args!("A payment API on http://{api}. Its account holds {START_BALANCE}."));
        for what in ["POST /pay", "the same again (a double click)"] {
            let answer = pay(api, Pay { key: None, amount: AMOUNT, latency_ms: 0 }).await?;
            exchange(what, &answer);
        }
        let held = balance(api).await?;
        self.figure("balance", held, START_BALANCE - 2 * AMOUNT);
        note(format_args!("{BAIT}Charged twice.{BAIT:#} This is what onlyonce ends."));
        Ok(())
    }

    async fn start_gateway(&mut self) -> Result<()> {
        let options = GatewayOptions {
            listen: self.listen,
            upstream: self.api.address,
            store: &self.store,
            unguarded: self.unguarded,
            lease_s: LEASE_S,
        };
        let gateway = Gateway::start(&options).await?;
        // With port 0 the first start picks one, and a restart must come back to it.
        self.listen = gateway.address;
        self.gateway = Some(gateway);
        Ok(())
    }

    async fn twice(&mut self) -> Result<()> {
        part(2, "The same API behind the gateway: sent twice with one key");
        note(format_args!(
            "onlyonce serve on http://{}, records in SQLite. Balance back to {START_BALANCE}.",
            self.listen
        ));
        let sent = Pay { key: Some("order-1"), amount: AMOUNT, latency_ms: 0 };
        let first = pay(self.listen, sent).await?;
        exchange("POST /pay, Idempotency-Key: order-1", &first);
        let second = pay(self.listen, sent).await?;
        exchange("the same again", &second);
        note(
            "The reply was recorded before it was sent; the second request got the record and never reached the API.",
        );
        self.figure("same answer", second.body == first.body && second.status == first.status, true);
        self.figure("first marked as a replay", first.replayed, false);
        self.figure("second marked as a replay", second.replayed, true);
        self.balance_is(START_BALANCE - AMOUNT).await
    }

    async fn at_once(&mut self) -> Result<()> {
        part(3, "Twenty copies at once");
        let sent = Pay { key: Some("order-2"), amount: AMOUNT, latency_ms: 300 };
        let answers = try_join_all((0..COPIES).map(|_| pay(self.listen, sent))).await?;
        let ran = answers.iter().filter(|answer| !answer.replayed).count();
        note(format_args!("{COPIES} connections, one key. One ran, the others waited for its answer."));
        exchange("each of them", &answers[0]);
        self.figure("ran", ran, 1);
        self.figure("different answers", answers.iter().filter(|a| a.body != answers[0].body).count(), 0);
        self.balance_is(START_BALANCE - 2 * AMOUNT).await
    }

    async fn another_amount(&mut self) -> Result<()> {
        part(4, "The same key with another amount");
        let answer =
            pay(self.listen, Pay { key: Some("order-1"), amount: 2 * AMOUNT, latency_ms: 0 }).await?;
        exchange("POST /pay {\"amount\":200}, Idempotency-Key: order-1", &answer);
        note(
            "Another request under a used key is a mistake of the client: it is refused, not charged, and not answered with",
        );
        note("the reply of the first.");
        self.figure("status", answer.status, 422);
        self.balance_is(START_BALANCE - 2 * AMOUNT).await
    }

    async fn no_key(&mut self) -> Result<()> {
        part(5, "No key");
        let answer = pay(self.listen, Pay { key: None, amount: AMOUNT, latency_ms: 0 }).await?;
        exchange("POST /pay without a key", &answer);
        note(
            "Without a key nobody could tell a retry from a second payment, so it is refused before anything runs.",
        );
        self.figure("status", answer.status, 400);
        self.balance_is(START_BALANCE - 2 * AMOUNT).await
    }

    async fn killed(&mut self) -> Result<()> {
        part(6, "kill -9 of the gateway in the middle of a payment");
        let sent = Pay { key: Some("order-3"), amount: AMOUNT, latency_ms: 5_000 };
        let listen = self.listen;
        let first = tokio::spawn(async move { pay(listen, sent).await });
        self.wait_for_charge(START_BALANCE - 3 * AMOUNT).await?;
        self.gateway.take().context("the gateway runs")?.kill().await?;
        let lost = first.await?.is_err();
        note("The API has charged and is slow to say so; the gateway is killed; the client gets no answer.");
        self.figure("answer lost", lost, true);
        self.start_gateway().await?;
        note("Restarted on the same file. The client tries again:");
        let retry = Pay { latency_ms: 0, ..sent };
        let answer = self.after_the_lease(retry).await?;
        exchange("the same again", &answer);
        note(
            "The record says that it was sent and never answered: it may have happened, so it is not run again.",
        );
        self.figure("status", answer.status, 409);
        self.figure("code", answer.code().as_deref().unwrap_or("none"), "outcome-unknown");
        self.balance_is(START_BALANCE - 3 * AMOUNT).await?;
        note(
            "It may have happened, so it is not run again. The operator looks it up at the bank and says what it was:",
        );
        let truth = format!("{{\"charged\":{AMOUNT},\"balance\":{}}}", START_BALANCE - 3 * AMOUNT);
        self.resolve("order-3", &truth).await?;
        let answer = pay(self.listen, retry).await?;
        exchange("the same again", &answer);
        self.figure("status", answer.status, 200);
        self.figure("the operator's bytes", answer.body == truth, true);
        self.balance_is(START_BALANCE - 3 * AMOUNT).await
    }

    /// The charge reached the API itself; asked there, since the gateway is about to die.
    async fn wait_for_charge(&self, expected: i64) -> Result<()> {
        for _ in 0..1000 {
            if balance(self.api.address).await? <= expected {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        anyhow::bail!("the payment did not reach the API within 10 s")
    }

    /// Until the dead owner's lease is over a retry is told that it is in progress.
    async fn after_the_lease(&self, sent: Pay<'_>) -> Result<Answer> {
        for _ in 0..30 {
            let answer = pay(self.listen, sent).await?;
            if answer.code().as_deref() != Some("in-progress") {
                return Ok(answer);
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        anyhow::bail!("the lease of the killed gateway does not end")
    }

    async fn resolve(&self, key: &str, body: &str) -> Result<()> {
        let store = format!("sqlite:{}", self.store.display());
        let reason = "looked it up at the bank";
        let words = ["keys", "resolve", key, "--status", "200", "--body", body, "--reason", reason];
        note(format_args!(
            "{DIM}$ onlyonce keys resolve {key} --status 200 --body '{body}' --reason '{reason}'{DIM:#}"
        ));
        let program = std::env::current_exe()?;
        let output =
            tokio::process::Command::new(program).args(words).args(["--store", &store]).output().await?;
        // With the guard off there is nothing to resolve, and the figure after this says so.
        ensure!(
            output.status.success() || self.unguarded,
            "keys resolve failed: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    async fn balance_is(&mut self, expected: i64) -> Result<()> {
        let held = balance(self.listen).await?;
        self.figure("balance", held, expected);
        Ok(())
    }

    #[expect(clippy::needless_pass_by_value, reason = "figures are read, compared and printed on the spot")]
    fn figure<T: PartialEq + Display>(&mut self, what: &str, got: T, expected: T) {
        if got == expected {
            line(format_args!("   {GOOD}✓{GOOD:#} {what}: {BOLD}{got}{BOLD:#}"));
        } else {
            self.wrong += 1;
            line(format_args!("   {BAD}✗ {what}: {got}, must be {expected}{BAD:#}"));
        }
    }

    /// Stays up until Ctrl-C or SIGTERM.
    pub(crate) async fn stay(&self) -> Result<()> {
        let to = self.listen;
        line("");
        line(format_args!("{BOLD}It is still running.{BOLD:#} Try it from another terminal:"));
        line("");
        line(format_args!(
            "  curl -i http://{to}/pay -H 'Idempotency-Key: my-order' -H 'Content-Type: application/json' -d '{{\"amount\":100}}'"
        ));
        line(format_args!("  curl http://{to}/balance"));
        line(format_args!("  sqlite3 {} 'select * from idempotency_keys'", self.store.display()));
        line("");
        line("Ctrl-C ends it and removes its files.");
        let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
        tokio::select! {
            interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot wait for Ctrl-C"),
            _ = terminate.recv() => Ok(()),
        }
    }

    pub(crate) async fn end(&mut self) -> Result<()> {
        match self.gateway.take() {
            Some(gateway) => gateway.stop().await,
            None => Ok(()),
        }
    }
}

fn part(number: u8, title: &str) {
    line("");
    line(format_args!("{BOLD}{number}. {title}{BOLD:#}"));
}

fn note(text: impl Display) {
    line(format_args!("   {text}"));
}

fn exchange(what: &str, answer: &Answer) {
    let body = match answer.code() {
        Some(code) => format!("code: {code}"),
        None => answer.body.clone(),
    };
    let replayed = if answer.replayed { "  (Idempotency-Replayed: true)" } else { "" };
    line(format_args!("   → {what}"));
    line(format_args!("     {DIM}←{DIM:#} {} {body}{DIM}{replayed}{DIM:#}", answer.status));
}

/// A closed pipe (`onlyonce demo | head`) is no reason to fail.
fn line(text: impl Display) {
    use std::io::Write;
    let _ = writeln!(anstream::stdout(), "{text}");
}
