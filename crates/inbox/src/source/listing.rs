//! Which files a bulk load reads, in which order.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use glob::{MatchOptions, Pattern};

use crate::error::InboxError;
use crate::scratch::Names;

/// How the messages of a file stand in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One message in a file, laid out in any way.
    Json,
    /// A message in each line (NDJSON).
    Lines,
}

/// What a name leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Json,
    Lines,
    /// Standard input, where the name is `-`, or what else is no regular file and is read once, line by line.
    Stream,
    /// Not a file, though it has the name of one.
    NoFile,
}

/// What of the folders was left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Files whose names end neither in .json nor in .ndjson or .jsonl.
    pub other_files: u64,
    /// Files whose names start with a dot.
    pub hidden: u64,
    /// Folders below the folder: they are not entered.
    pub folders: u64,
}

/// The files of one load. In memory there is a part of bounded size.
#[derive(Debug)]
pub(crate) struct Listing {
    names: Names,
    pub(crate) skipped: Skipped,
    /// Bytes of the files that are read line by line.
    pub(crate) line_bytes: u64,
}

impl Listing {
    /// Looks where the sources lead to: folders, files, `-`, and patterns such as `in/2026-*/*.json` or `in/**/*.json`.
    ///
    /// # Errors
    /// [`InboxError::File`] for one that is not there or cannot be read.
    pub(crate) fn of(sources: &[OsString], format: Option<Format>) -> Result<Self, InboxError> {
        let mut listing = Self { names: Names::new()?, skipped: Skipped::default(), line_bytes: 0 };
        let mut bytes = 0;
        for (part, source) in sources.iter().enumerate() {
            let path = Path::new(source);
            match fs::metadata(path) {
                _ if source == "-" => listing.names.add(part, path, Kind::Stream as u8)?,
                Ok(found) if found.is_dir() => listing.folder(part, path, format)?,
                Ok(found) if found.is_file() => {
                    let kind = Kind::from(format.or(format_of(path)).unwrap_or(Format::Lines));
                    listing.names.add(part, path, kind as u8)?;
                }
                Ok(_) => listing.names.add(part, path, Kind::Stream as u8)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    listing.pattern(part, path, format, error)?;
                }
                Err(error) => return Err(InboxError::file(path, "cannot be read", error)),
            }
        }
        listing.each(|path, kind| {
            if kind == Kind::Lines {
                bytes += fs::metadata(path).map_or(0, |file| file.len());
            }
            true
        })?;
        listing.line_bytes = bytes;
        Ok(listing)
    }

    pub(crate) fn count(&self) -> Result<u64, InboxError> {
        self.names.count()
    }

    /// Calls `take` with each file in order until it answers false.
    pub(crate) fn each(&self, mut take: impl FnMut(PathBuf, Kind) -> bool) -> Result<(), InboxError> {
        self.names.each(|name, kind| {
            let kind = [Kind::Json, Kind::Lines, Kind::Stream, Kind::NoFile][usize::from(kind)];
            take(name.into(), kind)
        })
    }

    fn folder(&mut self, part: usize, folder: &Path, format: Option<Format>) -> Result<(), InboxError> {
        entries(folder, |path, name, about| {
            let known = format_of(Path::new(name));
            match known {
                _ if name.as_encoded_bytes().starts_with(b".") => self.skipped.hidden += 1,
                None if about.is_dir() => self.skipped.folders += 1,
                None => self.skipped.other_files += 1,
                Some(known) => {
                    let kind = if about.is_file() { format.unwrap_or(known).into() } else { Kind::NoFile };
                    self.names.add(part, path, kind as u8)?;
                }
            }
            Ok(())
        })
    }

    fn pattern(
        &mut self,
        part: usize,
        path: &Path,
        format: Option<Format>,
        missing: io::Error,
    ) -> Result<(), InboxError> {
        let text = path.to_str().filter(|text| text.contains(['*', '?', '[']));
        let Some(text) = text else { return Err(InboxError::file(path, "cannot be read", missing)) };
        let pattern = Pattern::new(text)
            .map_err(|error| InboxError::file(path, "not a pattern", io::Error::other(error)))?;
        let is_plain = |part: &Component<'_>| {
            !part.as_os_str().as_encoded_bytes().iter().any(|byte| matches!(byte, b'*' | b'?' | b'['))
        };
        let base: PathBuf = path.components().take_while(is_plain).collect();
        let depth = path.components().count() - base.components().count();
        let walk = Walk { pattern, part, format, depth: (!text.contains("**")).then_some(depth) };
        match walk.enter(&self.names, &base, 1)? {
            0 => Err(InboxError::file(path, "no file matches this pattern", missing)),
            _ => Ok(()),
        }
    }
}

struct Walk {
    pattern: Pattern,
    part: usize,
    format: Option<Format>,
    // `None`: to any depth.
    depth: Option<usize>,
}

impl Walk {
    // Answers how many files matched.
    fn enter(&self, names: &Names, folder: &Path, level: usize) -> Result<u64, InboxError> {
        const OPTIONS: MatchOptions = MatchOptions {
            case_sensitive: true,
            require_literal_separator: true,
            require_literal_leading_dot: true,
        };
        let mut found = 0;
        entries(folder, |path, _, about| {
            // A link to a folder above could lead round for ever.
            let enters = match self.depth {
                Some(depth) => level < depth,
                None => !path.is_symlink(),
            };
            if about.is_dir() && enters {
                found += self.enter(names, path, level + 1)?;
            } else if !about.is_dir() && self.pattern.matches_path_with(path, OPTIONS) {
                let format = self.format.or(format_of(path)).unwrap_or(Format::Json);
                let kind = if about.is_file() { format.into() } else { Kind::NoFile };
                names.add(self.part, path, kind as u8)?;
                found += 1;
            }
            Ok(())
        })?;
        Ok(found)
    }
}

fn entries(
    folder: &Path,
    mut take: impl FnMut(&Path, &std::ffi::OsStr, &About) -> Result<(), InboxError>,
) -> Result<(), InboxError> {
    let failed = |error| InboxError::file(folder, "the folder cannot be read", error);
    let here = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    for entry in fs::read_dir(here).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        take(&folder.join(&name), &name, &About::of(&entry).map_err(failed)?)?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum About {
    File,
    Folder,
    Other,
}

impl About {
    fn of(entry: &fs::DirEntry) -> io::Result<Self> {
        let mut kind = entry.file_type()?;
        if kind.is_symlink() {
            // One that leads nowhere is no file: it is reported, not skipped.
            match fs::metadata(entry.path()) {
                Ok(found) => kind = found.file_type(),
                Err(_) => return Ok(Self::Other),
            }
        }
        Ok(match kind {
            kind if kind.is_file() => Self::File,
            kind if kind.is_dir() => Self::Folder,
            _ => Self::Other,
        })
    }

    fn is_file(self) -> bool {
        self == Self::File
    }

    fn is_dir(self) -> bool {
        self == Self::Folder
    }
}

impl From<Format> for Kind {
    fn from(format: Format) -> Self {
        match format {
            Format::Json => Self::Json,
            Format::Lines => Self::Lines,
        }
    }
}

/// The format that the end of a name says, in any case of letters.
pub(crate) fn format_of(path: &Path) -> Option<Format> {
    let end = path.extension()?.to_str()?.to_ascii_lowercase();
    match end.as_str() {
        "json" => Some(Format::Json),
        "ndjson" | "jsonl" => Some(Format::Lines),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(sources: &[&str]) -> (Vec<(String, Kind)>, Skipped) {
        let sources: Vec<OsString> = sources.iter().map(Into::into).collect();
        let listing = Listing::of(&sources, None).unwrap();
        let mut found = Vec::new();
        listing
            .each(|path, kind| {
                found.push((
                    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
                    kind,
                ));
                true
            })
            .unwrap();
        assert_eq!(listing.count().unwrap(), found.len() as u64);
        (found, listing.skipped)
    }

    #[test]
    fn folders_patterns_and_files_are_listed_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for name in [
            "b.json",
            "a.JSON",
            "주문.json",
            "c.ndjson",
            "d.jsonl",
            "readme.md",
            ".x.json",
            "a10.json",
            "a2.json",
        ] {
            fs::write(root.join(name), "{}").unwrap();
        }
        fs::create_dir_all(root.join("sub/deep")).unwrap();
        fs::create_dir(root.join("e.json")).unwrap();
        fs::write(root.join("sub/s.json"), "{}").unwrap();
        fs::write(root.join("sub/deep/t.json"), "{}").unwrap();
        std::os::unix::fs::symlink(root, root.join("sub/loop")).unwrap();
        std::os::unix::fs::symlink(root.join("nowhere"), root.join("f.json")).unwrap();

        let at = |name: &str| root.join(name).to_str().unwrap().to_owned();
        let (found, skipped) = listed(&[&at("")]);
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            [
                "a.JSON",
                "a10.json",
                "a2.json",
                "b.json",
                "c.ndjson",
                "d.jsonl",
                "e.json",
                "f.json",
                "주문.json"
            ]
        );
        assert_eq!(found.iter().filter(|(_, kind)| *kind == Kind::NoFile).count(), 2);
        assert_eq!(found.iter().filter(|(_, kind)| *kind == Kind::Lines).count(), 2);
        assert_eq!(skipped, Skipped { other_files: 1, hidden: 1, folders: 1 });

        let names = |sources: &[&str]| -> Vec<String> {
            listed(sources).0.into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names(&[&at("a*.json")]), ["a10.json", "a2.json"]);
        assert_eq!(names(&[&at("s?b/*.json")]), ["s.json"]);
        assert_eq!(names(&[&at("sub/**/*.json")]), ["t.json", "s.json"]);
        assert_eq!(names(&[&at("b.json"), &at("a*.json"), "-"]), ["b.json", "a10.json", "a2.json", "-"]);
        for missing in [at("nope"), at("nope*.json"), at("nope/*.json")] {
            assert!(matches!(Listing::of(&[missing.into()], None), Err(InboxError::File { .. })));
        }
    }
}
