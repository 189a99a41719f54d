//! At-least-once messages, applied once.
//!
//! A sender that got no answer sends again, a queue delivers again, somebody runs last night's batch again: duplicates are
//! the rule. Here a unique constraint decides whether a message is new, never a look before the insert, so that of any
//! number of copies at once one is applied and the others get its response.
//!
//! ```
//! use onlyonce_inbox::{Body, Envelope, Inbox, Incoming, Keys, Place, Verdict, Via, Work};
//!
//! # let folder = tempfile::tempdir()?;
//! let inbox = Inbox::open(folder.path().join("inbox.db"))?;
//! let text = br#"{"msg_id":"M1","order_no":"O-7","amount":100}"#;
//! let envelope = Envelope::read(text, &Keys::default(), Place::start_of("M1.json"))?;
//! let message = Incoming { envelope: &envelope, via: Via::Queue, source: "M1.json", body: text };
//!
//! let first = inbox.receive_with(&message, &Work::RecordAlone)?;
//! assert_eq!(first.verdict, Verdict::Applied);
//! let second = inbox.receive_with(&message, &Work::RecordAlone)?;
//! assert_eq!(second.verdict, Verdict::Duplicate(Body::Same));
//! assert_eq!(second.response, first.response);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! For work of your own in the same transaction see [`Inbox::receive`], for work elsewhere [`Leased`].
//!
//! # The file
//! `inbox_log` has a row for each message: `msg_id`, `biz_key`, `status`, `response`, `created_at`. `inbox_deliveries` has one for
//! each delivery, duplicates and conflicts (a known key with another body) too, with the path that it came by.
//! `inbox_leases` has a row for each message that a handler works on outside of the database.
//! `inbox_totals` keeps the counts of deliveries that were purged, `inbox_audit` what operators did. They may live in a file
//! with business data, and a table `inbox_log` made by hand is taken if it tells keys apart byte for byte.
mod duplicates;
mod envelope;
mod error;
mod expression;
mod handler;
mod inbox;
mod lease;
mod load;
mod purge;
mod race;
mod receive;
mod record;
mod scratch;
mod source;
mod table;
mod work;

pub use duplicates::{DuplicateView, PathCount, PathTotal};
pub use envelope::{BodyDigest, Envelope, Keys, Place};
pub use error::{BadData, ErrorKind, InboxError};
pub use expression::{InvalidExpression, KeyExpression};
pub use handler::{Exec, RESPONSE_BYTES_MAX, Sql};
#[cfg(feature = "http")]
pub use handler::{Http, HttpUrl, InvalidUrl};
pub use inbox::{Inbox, InboxOptions};
pub use lease::LeaseView;
pub use load::{Ignored, LoadEvent, LoadOptions, LoadReport, Sources};
#[cfg(feature = "http")]
pub use onlyonce_tls::{ClientTls, InvalidTls};
pub use purge::{InvalidPeriod, PurgeOptions, PurgeReport};
pub use race::{Attempt, AttemptResult, RaceReport, race, racer};
pub use receive::{Body, Incoming, Receipt, Verdict, Via};
pub use record::{AuditView, DeliveryView, Forgotten, RecordView, RowView};
pub use source::{Format, MESSAGE_BYTES_MAX, Skipped, read_message};
pub use work::{Call, Ending, Handler, Leased, Stop, TransactionWork, Work};
