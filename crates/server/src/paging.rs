//! Pages of lists.

use crate::error::ApiError;
use crate::wire::batch::Page;

/// The number of entries of a page: what was asked for, from 1 to `most`.
pub(crate) fn limit(asked: Option<usize>, default: usize, most: usize) -> Result<usize, ApiError> {
    match asked.unwrap_or(default) {
        limit if (1..=most).contains(&limit) => Ok(limit),
        limit => Err(ApiError::invalid(
            "limit",
            format!("limit must be between 1 and {most}, not {limit}"),
        )),
    }
}

/// The part of `all` behind `after`.
pub(crate) fn page<T>(
    all: Vec<T>,
    after: Option<&str>,
    limit: usize,
    id: impl Fn(&T) -> &str,
) -> Result<Page<T>, ApiError> {
    let from = match after {
        None => 0,
        Some(after) => {
            let missing = || ApiError::invalid("after", format!("after: there is no `{after}`"));
            let at = all.iter().position(|one| id(one) == after);
            1 + at.ok_or_else(missing)?
        }
    };
    let has_more = all.len() > from + limit;
    let data: Vec<T> = all.into_iter().skip(from).take(limit).collect();
    Ok(Page {
        object: "list",
        first_id: data.first().map(|one| id(one).to_owned()),
        last_id: data.last().map(|one| id(one).to_owned()),
        has_more,
        data,
    })
}
