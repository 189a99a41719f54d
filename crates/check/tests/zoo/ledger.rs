//! The work: payments from one account, and the file that survives a crash.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::nature::{Breed, Nature};
use crate::wire::Reply;

/// How much may be paid at once.
const LIMIT: u64 = 1_000_000;
const START: u64 = 1_000_000_000;

/// What was paid, and how often.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    payments: Vec<(Instant, u64)>,
}

impl Ledger {
    pub(crate) fn pay(&mut self, amount: u64) -> u64 {
        self.payments.push((Instant::now(), amount));
        self.count()
    }

    pub(crate) fn count(&self) -> u64 {
        self.payments.len() as u64
    }

    pub(crate) fn balance(&self) -> u64 {
        self.before(Instant::now()).1
    }

    /// How many payments there were by then, and what was left.
    pub(crate) fn before(&self, then: Instant) -> (u64, u64) {
        let seen = self.payments.iter().filter(|(at, _)| *at <= then);
        seen.fold((0, START), |(count, left), (_, amount)| (count + 1, left - amount))
    }
}

/// A request of payment, understood.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) amount: u64,
    pub(crate) takes: Takes,
    /// Fails the first time for a reason that passes.
    pub(crate) flaky: bool,
    pub(crate) receipt: Receipt,
    /// Its number, where the client gives one.
    pub(crate) number: Option<String>,
}

/// How long the work takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Takes {
    Time(Duration),
    /// Until the gate of the shop is opened.
    Gate,
}

/// What the answer looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receipt {
    Json,
    /// Bytes that are no text.
    Binary,
    /// Some 100 KB.
    Big,
    /// With a `Content-Encoding`.
    Gzip,
    /// 204.
    Empty,
}

impl Order {
    /// Reads `{"amount": n, "slow": ms | "gate", "flaky": bool, "receipt": "binary" | "big" | "gzip" | "empty",
    /// "order": text}`; all but `amount` may be left out, and other members are welcome.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, Reply> {
        let bad = |what: &str| Reply::problem(400, "bad-order", what);
        let order: Value = serde_json::from_slice(body).map_err(|_| bad("This is no JSON."))?;
        let amount = order["amount"].as_u64().ok_or_else(|| bad("amount must be a whole number."))?;
        if amount > LIMIT {
            return Err(Reply::problem(402, "insufficient-funds", "There is not so much on the account."));
        }
        let receipt = match order["receipt"].as_str() {
            None => Receipt::Json,
            Some("binary") => Receipt::Binary,
            Some("big") => Receipt::Big,
            Some("gzip") => Receipt::Gzip,
            Some("empty") => Receipt::Empty,
            Some(_) => return Err(bad("receipt must be binary, big, gzip or empty.")),
        };
        let takes = match &order["slow"] {
            Value::String(gate) if gate == "gate" => Takes::Gate,
            slow => Takes::Time(Duration::from_millis(slow.as_u64().unwrap_or(3).min(10_000))),
        };
        let number = order["order"].as_str().map(str::to_owned);
        Ok(Self { amount, takes, flaky: order["flaky"] == true, receipt, number })
    }
}

/// The answer to payment number `id`.
pub(crate) fn receipt(order: &Order, id: u64, balance: u64, path: &str, nature: Nature) -> Reply {
    if nature.is(Breed::Silent) {
        return Reply::new(200, r#"{"ok":true}"#).header("content-type", "application/json");
    }
    let (content_type, body) = match order.receipt {
        // Members that are not sorted, so that JSON written anew differs.
        Receipt::Json => (
            "application/json",
            format!(r#"{{"id":{id},"charged":{}, "balance":{balance}}}"#, order.amount).into_bytes(),
        ),
        Receipt::Binary => {
            let bytes = id.to_be_bytes().into_iter().chain(0..=255).collect();
            ("application/octet-stream", bytes)
        }
        Receipt::Big => ("text/plain", format!("payment {id}\n").repeat(8_000).into_bytes()),
        Receipt::Gzip => ("text/plain", gzip(format!("payment {id}\n").as_bytes())),
        Receipt::Empty => ("", Vec::new()),
    };
    let status = match order.receipt {
        Receipt::Empty => 204,
        _ if nature.is(Breed::SeeOther) => 303,
        _ => 201,
    };
    let mut reply = Reply::new(status, body)
        .header("location", &format!("{path}/{id}"))
        .header("link", &format!("<{path}/{id}/refund>; rel=\"refund\""))
        .header("link", &format!("<{path}/{id}/receipt>; rel=\"receipt\""))
        .header("etag", &format!("\"{id}\""))
        .header("set-cookie", &format!("visit={id}; HttpOnly"));
    if !content_type.is_empty() {
        reply = reply.header("content-type", content_type);
    }
    if order.receipt == Receipt::Gzip { reply.header("content-encoding", "gzip") } else { reply }
}

/// RFC 1952, with one block that is stored as it is.
fn gzip(text: &[u8]) -> Vec<u8> {
    let length = text.len() as u16;
    let mut bytes = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255, 1];
    bytes.extend(length.to_le_bytes());
    bytes.extend((!length).to_le_bytes());
    bytes.extend(text);
    let checksum = text.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    });
    bytes.extend((!checksum).to_le_bytes());
    bytes.extend(u32::from(length).to_le_bytes());
    bytes
}

/// Lines of JSON, each appended by one write: a killed process leaves whole lines.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
}

impl Journal {
    /// Opens it, and gives the lines that are there.
    pub(crate) fn open(path: &Path) -> (Self, Vec<Value>) {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let lines = text.lines().map(|line| serde_json::from_str(line).expect("a whole line")).collect();
        let file =
            OpenOptions::new().create(true).append(true).open(path).expect("the journal's folder is there");
        (Self { file }, lines)
    }

    pub(crate) fn append(&mut self, line: &Value) {
        self.file.write_all(format!("{line}\n").as_bytes()).expect("the disk has room");
    }
}

/// The line that says that a payment was made.
pub(crate) fn paid(amount: u64) -> Value {
    json!({"paid": amount})
}
