//! Names of models on the Hub.

use std::fmt;
use std::str::FromStr;

/// A repository of the Hub: `owner/name`, with `:QUANT` where one of its GGUF files is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoId {
    /// `owner/name`, or a bare name.
    pub id: String,
    /// Part of the name of a GGUF file.
    pub quant: Option<String>,
}

impl RepoId {
    /// `None` where `text` cannot be the name of a repository.
    pub fn parse(text: &str) -> Option<Self> {
        let (id, quant) = match text.split_once(':') {
            Some((id, quant)) => (id, Some(quant)),
            None => (text, None),
        };
        let legal = |part: &str| {
            let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            part.chars().all(inner) && part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        };
        let parts: Vec<_> = id.split('/').collect();
        (parts.len() <= 2 && parts.iter().all(|part| legal(part)) && quant.is_none_or(legal)).then(|| Self {
            id: id.to_owned(),
            quant: quant.map(str::to_owned),
        })
    }
}

/// A model of the Hub, and perhaps which revision of it: `owner/name`, `owner/name:QUANT`, `owner/name@REVISION`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// The repository.
    pub repo: RepoId,
    /// Branch, tag or commit.
    pub revision: Option<String>,
}

impl FromStr for ModelName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, revision) = match text.split_once('@') {
            Some((name, revision)) => (name, Some(revision)),
            None => (text, None),
        };
        // The cache has a file of that name.
        let legal = |revision: &str| {
            let character = |c: char| c.is_ascii_alphanumeric() || "-_./+".contains(c);
            !revision.is_empty()
                && revision.chars().all(character)
                && revision.split('/').all(|part| !["", ".", ".."].contains(&part))
        };
        let repo = RepoId::parse(name).filter(|_| revision.is_none_or(legal));
        let repo = repo.ok_or_else(|| {
            "a Hub id is expected, such as owner/name, owner/name:Q4_K_M or owner/name@main".to_owned()
        })?;
        Ok(Self {
            repo,
            revision: revision.map(str::to_owned),
        })
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo.id)?;
        if let Some(quant) = &self.repo.quant {
            write!(f, ":{quant}")?;
        }
        match &self.revision {
            Some(revision) => write!(f, "@{revision}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_repositories() {
        let id = |text| RepoId::parse(text).map(|repo| (repo.id, repo.quant));
        assert_eq!(id("gpt2"), Some(("gpt2".into(), None)));
        assert_eq!(
            id("Qwen/Qwen2.5-0.5B:Q4_K_M"),
            Some(("Qwen/Qwen2.5-0.5B".into(), Some("Q4_K_M".into())))
        );
        for wrong in [
            "", "a/b/c", "../x", "./x", "a b", "/abs", "owner/", "owner/..", "a:b:c",
        ] {
            assert_eq!(RepoId::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn names_with_revisions() {
        for text in ["a/b", "a/b:Q8_0", "a/b@v1.0", "a/b:Q8_0@refs/pr/1"] {
            let name: ModelName = text.parse().unwrap();
            assert_eq!(name.to_string(), text);
        }
        for wrong in ["a/b@", "a/b@../x", "a/b@/x", "a/b@x y", "a@b@c", "@main", "../b"] {
            assert!(wrong.parse::<ModelName>().is_err(), "{wrong}");
        }
    }
}
