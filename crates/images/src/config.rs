//! Reads processor settings: every field is known, or an error.

use plimsoll_core::untrusted::quotable;
use serde_json::{Map, Value};

use crate::error::ProcessorError;

/// The fields of one JSON object of which none has been read yet.
#[derive(Debug)]
pub(crate) struct Fields {
    file: &'static str,
    left: Map<String, Value>,
}

impl Fields {
    pub(crate) fn new(file: &'static str, value: &Value) -> Result<Self, ProcessorError> {
        match value {
            Value::Object(fields) => Ok(Self {
                file,
                left: fields.clone(),
            }),
            _ => Err(ProcessorError {
                file,
                message: "a JSON object is expected".to_owned(),
            }),
        }
    }

    pub(crate) fn wrong(&self, message: impl Into<String>) -> ProcessorError {
        ProcessorError {
            file: self.file,
            message: quotable(&message.into()),
        }
    }

    /// The field's value, unless it is absent or null.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.left.shift_remove(name).filter(|value| !value.is_null())
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ProcessorError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(format!("`{name}` must be a string, not {other}"))),
        }
    }

    /// A whole number from 1 to `most`.
    pub(crate) fn count(&mut self, name: &str, most: usize) -> Result<Option<usize>, ProcessorError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        match count.filter(|count| (1..=most).contains(count)) {
            Some(count) => Ok(Some(count)),
            None => Err(self.wrong(format!(
                "`{name}` must be a whole number from 1 to {most}, not {value}"
            ))),
        }
    }

    pub(crate) fn needed(&mut self, name: &str, most: usize) -> Result<usize, ProcessorError> {
        let count = self.count(name, most)?;
        count.ok_or_else(|| self.wrong(format!("`{name}` is missing")))
    }

    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Self>, ProcessorError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(left)) => Ok(Some(Self {
                file: self.file,
                left,
            })),
            Some(other) => Err(self.wrong(format!("`{name}` must be an object, not {other}"))),
        }
    }

    /// Three finite numbers, one for each colour.
    pub(crate) fn colours(&mut self, name: &str) -> Result<Option<[f32; 3]>, ProcessorError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let numbers = value.as_array().map(|list| list.iter().filter_map(Value::as_f64));
        let numbers: Vec<f32> = numbers
            .into_iter()
            .flatten()
            .map(|number| number as f32)
            .collect();
        match <[f32; 3]>::try_from(numbers) {
            Ok(colours) if colours.iter().all(|c| c.is_finite()) => Ok(Some(colours)),
            _ => Err(self.wrong(format!("`{name}` must be three numbers, not {value}"))),
        }
    }

    pub(crate) fn number(&mut self, name: &str) -> Result<Option<f64>, ProcessorError> {
        match self.take(name).map(|value| (value.as_f64(), value)) {
            None => Ok(None),
            Some((Some(number), _)) if number.is_finite() => Ok(Some(number)),
            Some((_, value)) => Err(self.wrong(format!("`{name}` must be a number, not {value}"))),
        }
    }

    /// A switch that can only be `value`.
    pub(crate) fn only(&mut self, name: &str, value: bool) -> Result<(), ProcessorError> {
        match self.take(name) {
            None => Ok(()),
            Some(Value::Bool(found)) if found == value => Ok(()),
            Some(other) => Err(self.wrong(format!("`{name}` = {other} is not supported, only {value} is"))),
        }
    }

    /// Drops fields that change nothing here.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        self.left.retain(|name, _| !names.contains(&name.as_str()));
    }

    /// An error if anything is left but nulls.
    pub(crate) fn finish(mut self) -> Result<(), ProcessorError> {
        self.left.retain(|_, value| !value.is_null());
        match self.left.keys().next() {
            None => Ok(()),
            Some(name) => Err(self.wrong(format!(
                "`{name}` is a field that this server does not know: it cannot tell what images would look like to the model"
            ))),
        }
    }
}
