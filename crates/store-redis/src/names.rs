//! What a record is called, and which slot of a cluster it is in.

use onlyonce_core::{OperationId, StoreError, StoreErrorKind};
use sha2::{Digest, Sha256};

/// How many slots a cluster has.
pub(crate) const SLOTS: u16 = 16384;

/// How names are made: `idem:<key>` in the empty scope, else `idem@<32 hex of SHA-256(scope)>:<key>`; with a hash tag
/// `idem{tag}:…`. Prefix and tag hold no braces, so the first pair in a name is the tag's, or the key's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Names {
    prefix: String,
    tag: String,
}

impl Names {
    pub(crate) fn new(prefix: &str) -> Result<Self, StoreError> {
        let bad = prefix.is_empty() || prefix.len() > 64 || !prefix.bytes().all(is_plain);
        if bad {
            let why = "a prefix is 1 to 64 visible ASCII characters without braces, brackets, `@`, `!`, `:`, `*`, `?` and `\\`";
            return Err(StoreError::new(StoreErrorKind::Unfit, "open").with_detail(why));
        }
        Ok(Self { prefix: prefix.into(), tag: String::new() })
    }

    /// The same with every record in the slot of `tag`.
    pub(crate) fn with_tag(&self, tag: &str) -> Result<Self, StoreError> {
        let bad =
            tag.is_empty() || tag.len() > 255 || tag.contains(['{', '}']) || tag.contains(char::is_control);
        if bad {
            let why = "a hash tag is 1 to 255 bytes without braces and control characters";
            return Err(StoreError::new(StoreErrorKind::Unfit, "with_hash_tag").with_detail(why));
        }
        Ok(Self { prefix: self.prefix.clone(), tag: format!("{{{tag}}}") })
    }

    /// The name of a record.
    pub(crate) fn record(&self, id: &OperationId) -> String {
        let (scope, key) = (id.scope.as_str(), id.key.as_str());
        let mut name = String::with_capacity(self.prefix.len() + self.tag.len() + 34 + key.len());
        name.push_str(&self.prefix);
        name.push_str(&self.tag);
        if !scope.is_empty() {
            name.push('@');
            for byte in &Sha256::digest(scope)[..16] {
                name.extend(
                    [byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)])),
                );
            }
        }
        name.push(':');
        name.push_str(key);
        name
    }

    /// Whether `name` is that of this record, with whatever hash tag.
    pub(crate) fn is_name_of(&self, name: &[u8], id: &OperationId) -> bool {
        let plain = Self { prefix: self.prefix.clone(), tag: String::new() }.record(id);
        let Some(rest) = name.strip_prefix(self.prefix.as_bytes()) else { return false };
        let after_tag = match rest.first() {
            Some(b'{') => rest.iter().position(|byte| *byte == b'}').map_or(&[][..], |end| &rest[end + 1..]),
            _ => rest,
        };
        after_tag == &plain.as_bytes()[self.prefix.len()..]
    }

    /// What the names of records match: records without a scope, with one, and with a hash tag.
    pub(crate) fn patterns(&self) -> [String; 3] {
        [":", "@", "{"].map(|mark| format!("{}{mark}*", self.prefix))
    }

    /// What the names of records with this key match, in whatever scope and with whatever tag.
    pub(crate) fn patterns_of(&self, key: &str) -> Vec<String> {
        let mut literal = String::with_capacity(key.len());
        for c in key.chars() {
            if matches!(c, '*' | '?' | '[' | ']' | '^' | '\\') {
                literal.push('\\');
            }
            literal.push(c);
        }
        ["", "@*", "{*"].map(|mark| format!("{}{mark}:{literal}", self.prefix)).into()
    }

    /// The audit list next to the record of this name, in its slot of a cluster.
    pub(crate) fn audit(&self, name: &[u8], cluster: bool) -> String {
        match cluster {
            true => format!("{}!audit:{{{}}}", self.prefix, tag_of_slot(slot(name))),
            false => format!("{}!audit", self.prefix),
        }
    }

    /// What the names of audit lists match.
    pub(crate) fn audit_pattern(&self) -> String {
        format!("{}!audit*", self.prefix)
    }
}

// Nothing that is a pattern for SCAN, a tag, or a mark of ours.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_graphic() && !b"{}[]@!:*?\\^".contains(&byte)
}

/// The slot of a key: CRC16 of its hash tag, if it has one, else of all of it.
pub(crate) fn slot(key: &[u8]) -> u16 {
    let open = key.iter().position(|byte| *byte == b'{');
    let tag = open.and_then(|open| {
        let rest = &key[open + 1..];
        let close = rest.iter().position(|byte| *byte == b'}')?;
        (close > 0).then(|| &rest[..close])
    });
    crc16(tag.unwrap_or(key)) % SLOTS
}

// A text whose slot this is: the first number that has it.
fn tag_of_slot(wanted: u16) -> String {
    (0_u32..).map(|n| n.to_string()).find(|tag| crc16(tag.as_bytes()) % SLOTS == wanted).unwrap_or_default()
}

// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc: u16, byte| {
        let index = (crc >> 8) ^ u16::from(*byte);
        (crc << 8) ^ CRC16[usize::from(index)]
    })
}

const CRC16: [u16; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = (index as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 != 0 { (crc << 1) ^ 0x1021 } else { crc << 1 };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;
    use onlyonce_core::{Key, Scope};

    fn id(scope: &str, key: &str) -> OperationId {
        OperationId { scope: Scope::new(scope).unwrap(), key: Key::new(key).unwrap() }
    }

    #[test]
    fn names_are_frozen() {
        let names = Names::new("idem").unwrap();
        assert_eq!(names.record(&id("", "order-7")), "idem:order-7");
        assert_eq!(names.record(&id("shop", "k")), "idem@8d9001d32c6a703d95921a77115050f3:k");
        let tagged = names.with_tag("acct").unwrap();
        assert_eq!(tagged.record(&id("", "{x}")), "idem{acct}:{x}");
        assert_eq!(slot(b"idem{acct}:{x}"), slot(b"acct"));
    }

    #[test]
    fn two_operations_never_share_a_name() {
        let names = Names::new("idem").unwrap();
        let all: Vec<_> = ["", "a", "a:b", "ab"]
            .iter()
            .flat_map(|scope| ["b", ":b", "b:b", "@b", "{b}:b"].map(|key| names.record(&id(scope, key))))
            .collect();
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }

    #[test]
    fn a_name_is_recognised_with_and_without_a_tag() {
        let names = Names::new("idem").unwrap();
        for id in [id("", "k"), id("s", "k"), id("", "{k}"), id("", "a}b")] {
            for names in [names.clone(), names.with_tag("t").unwrap()] {
                assert!(names.is_name_of(names.record(&id).as_bytes(), &id), "{id:?}");
            }
            assert!(!names.is_name_of(b"idem:other", &id));
            assert!(!names.is_name_of(b"idem{", &id));
        }
    }

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot(b"123456789"), 0x31C3);
        assert_eq!(slot(b"foo"), 12182);
        assert_eq!(slot(b"{user1000}.following"), slot(b"user1000"));
        // An empty tag is none, and the first pair counts.
        assert_eq!(slot(b"foo{}{bar}"), crc16(b"foo{}{bar}") % SLOTS);
        assert_eq!(slot(b"foo{{bar}}zap"), crc16(b"{bar") % SLOTS);
        assert_eq!(slot(b"foo{bar}{zap}"), slot(b"bar"));
    }

    #[test]
    fn the_audit_list_is_in_the_slot_of_its_record() {
        let names = Names::new("idem").unwrap();
        for key in ["a", "a}b", "a{}b", "{x}y", "{"] {
            let name = names.record(&id("", key));
            assert_eq!(slot(names.audit(name.as_bytes(), true).as_bytes()), slot(name.as_bytes()), "{key}");
        }
    }

    #[test]
    fn a_prefix_is_plain() {
        for bad in ["", "a{b", "a*", "a:b", "a b", "é", "idem!"] {
            assert!(Names::new(bad).is_err(), "{bad}");
        }
        for bad in ["", "a}", "{", "\n"] {
            assert!(Names::new("idem").unwrap().with_tag(bad).is_err(), "{bad}");
        }
    }
}
