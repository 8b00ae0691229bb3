//! Arguments of a function one by one, from its JSON schema: for formats that do not write them as one JSON object.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use super::Function;

/// Maximum subschemas read of one function: references may be circular.
const MAX_SCHEMAS: usize = 64;
/// Maximum nesting of references and subschemas.
const MAX_DEPTH: usize = 16;
/// Maximum alternatives of one function's arguments.
const MAX_OBJECTS: usize = 16;

/// Keywords that constrain an object as a whole, which no constraint of single arguments expresses.
const OBJECT_KEYWORDS: [&str; 16] = [
    "$dynamicRef",
    "$recursiveRef",
    "const",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "enum",
    "if",
    "maxProperties",
    "minProperties",
    "not",
    "patternProperties",
    "propertyNames",
    "then",
    "unevaluatedProperties",
];

/// Keywords of schemas whose values are not, or not only, strings.
const OTHER_KEYWORDS: [&str; 21] = [
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "contains",
    "else",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "if",
    "items",
    "maxItems",
    "maximum",
    "minItems",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "prefixItems",
    "properties",
    "required",
    "then",
];

/// The schema of a function's arguments, split by argument.
#[derive(Debug)]
pub(super) struct Parameters<'a> {
    root: &'a Map<String, Value>,
    /// Alternatives, one of which the arguments match.
    pub(super) objects: Vec<Object<'a>>,
    /// Keywords, with their places, that `objects` do not express.
    pub(super) unenforced: Vec<String>,
    /// Subschemas that may still be read.
    left: usize,
}

/// One alternative of the arguments.
#[derive(Clone, Debug, Default)]
pub(super) struct Object<'a> {
    /// In the order of the schema.
    pub(super) arguments: Vec<Argument<'a>>,
    places: HashMap<&'a str, usize>,
    required: Vec<&'a str>,
    pub(super) additional: Additional<'a>,
}

/// An argument from `properties` or `required`.
#[derive(Clone, Debug)]
pub(super) struct Argument<'a> {
    pub(super) name: &'a str,
    /// All of these apply.
    pub(super) schemas: Vec<&'a Value>,
    pub(super) is_required: bool,
}

/// Arguments that are not in `properties`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum Additional<'a> {
    /// Not mentioned: possible, but not expected.
    #[default]
    Unspecified,
    /// Forbidden.
    None,
    /// All of these apply to each.
    Of(Vec<&'a Value>),
}

impl<'a> Parameters<'a> {
    pub(super) fn of(root: &'a Map<String, Value>) -> Self {
        let mut parameters = Self {
            root,
            objects: Vec::new(),
            unenforced: Vec::new(),
            left: MAX_SCHEMAS,
        };
        let mut objects = parameters.read_object(root, "", 0);
        for object in &mut objects {
            parameters.unenforced.extend(object.complete());
        }
        parameters.objects = objects;
        parameters
    }

    /// Whether the value of an argument is a string, which is written without quotes.
    pub(super) fn is_text(&self, name: &str) -> bool {
        let mut schemas = self.objects.iter().flat_map(|object| object.schemas(name));
        schemas.all(|schema| self.is_text_by(schema, 0))
    }

    /// [`Self::is_text`] of arguments that are not in `properties`.
    pub(super) fn additional_is_text(&self) -> bool {
        let mut schemas = self.objects.iter().flat_map(|object| match &object.additional {
            Additional::Of(schemas) => schemas.as_slice(),
            Additional::None | Additional::Unspecified => &[],
        });
        schemas.all(|schema| self.is_text_by(schema, 0))
    }

    /// Values without a schema are strings.
    fn is_text_by(&self, schema: &Value, depth: usize) -> bool {
        let Some(schema) = schema.as_object() else {
            return true;
        };
        if let (Some(target), true) = (self.target(schema), depth < MAX_DEPTH) {
            return self.is_text_by(target, depth + 1);
        }
        let is_string = |kind: &Value| kind == "string";
        match schema.get("type") {
            Some(Value::Array(kinds)) if kinds.iter().all(is_string) => return true,
            Some(Value::Array(kinds)) if kinds.iter().any(is_string) => {}
            Some(kind) => return is_string(kind),
            None => {}
        }
        match (schema.get("enum"), schema.get("const")) {
            (Some(Value::Array(values)), _) => !values.is_empty() && values.iter().all(Value::is_string),
            (_, Some(value)) => value.is_string(),
            _ => !schema.contains_key("type") && !OTHER_KEYWORDS.iter().any(|key| schema.contains_key(*key)),
        }
    }

    /// Target of a schema's `$ref` within the whole schema.
    pub(super) fn target(&self, schema: &Map<String, Value>) -> Option<&'a Value> {
        let mut path = schema.get("$ref")?.as_str()?.strip_prefix("#/")?.split('/');
        let name = |part: &str| part.replace("~1", "/").replace("~0", "~");
        let mut found = self.root.get(&name(path.next()?))?;
        for part in path {
            found = match found {
                Value::Object(fields) => fields.get(&name(part))?,
                Value::Array(items) => items.get(part.parse::<usize>().ok()?)?,
                _ => return None,
            };
        }
        Some(found)
    }

    fn read(&mut self, schema: &'a Value, place: &str, depth: usize) -> Vec<Object<'a>> {
        match schema {
            Value::Object(schema) if depth < MAX_DEPTH && self.left > 0 => {
                self.left -= 1;
                return self.read_object(schema, place, depth);
            }
            Value::Bool(true) => {}
            _ => self.unenforced.push(format!("the schema at {place}")),
        }
        vec![Object::default()]
    }

    fn read_object(&mut self, schema: &'a Map<String, Value>, place: &str, depth: usize) -> Vec<Object<'a>> {
        let mut objects = vec![Object::own(schema)];
        for (key, value) in schema {
            let here = format!("{place}/{key}");
            // Each list holds alternatives, one of which applies.
            let more = match (key.as_str(), value) {
                ("$ref", _) => match self.target(schema) {
                    Some(target) => vec![self.read(target, &here, depth + 1)],
                    None => vec![Vec::new()],
                },
                ("allOf", Value::Array(all)) => self.read_each(all, &here, depth),
                ("anyOf", Value::Array(any)) => vec![self.read_each(any, &here, depth).concat()],
                ("oneOf", Value::Array(any)) => {
                    // That no other alternative may match is not expressed.
                    self.unenforced.push(named(key, place));
                    vec![self.read_each(any, &here, depth).concat()]
                }
                ("type", Value::Array(kinds)) if kinds.iter().any(|kind| kind == "object") => continue,
                ("type", kind) if kind == "object" => continue,
                ("unevaluatedProperties", Value::Bool(false)) => continue,
                ("minProperties", least) if *least == 0 => continue,
                ("type", _) => vec![Vec::new()],
                (key, _) if OBJECT_KEYWORDS.contains(&key) => vec![Vec::new()],
                _ => continue,
            };
            for ways in more {
                if ways.is_empty() || objects.len() * ways.len() > MAX_OBJECTS {
                    self.unenforced.push(named(key, place));
                } else {
                    let each = objects.iter();
                    objects = each.flat_map(|one| ways.iter().map(|way| one.and(way))).collect();
                }
            }
        }
        objects
    }

    fn read_each(&mut self, schemas: &'a [Value], place: &str, depth: usize) -> Vec<Vec<Object<'a>>> {
        let each = schemas.iter().enumerate();
        each.map(|(i, schema)| self.read(schema, &format!("{place}/{i}"), depth + 1))
            .collect()
    }
}

/// A keyword and where it stands.
pub(super) fn named(keyword: &str, place: &str) -> String {
    match place {
        "" => format!("`{keyword}`"),
        place => format!("`{keyword}` at {place}"),
    }
}

impl<'a> Object<'a> {
    fn own(schema: &'a Map<String, Value>) -> Self {
        let properties = schema.get("properties").and_then(Value::as_object);
        let required = schema.get("required").and_then(Value::as_array);
        let mut object = Self {
            required: required.into_iter().flatten().filter_map(Value::as_str).collect(),
            additional: match schema.get("additionalProperties") {
                None => Additional::Unspecified,
                Some(Value::Bool(false)) => Additional::None,
                Some(schema) => Additional::Of(vec![schema]),
            },
            ..Self::default()
        };
        for (name, schema) in properties.into_iter().flatten() {
            object.push(name, vec![schema]);
        }
        object
    }

    fn push(&mut self, name: &'a str, schemas: Vec<&'a Value>) {
        self.places.insert(name, self.arguments.len());
        self.arguments.push(Argument {
            name,
            schemas,
            is_required: false,
        });
    }

    /// An object that matches both.
    fn and(&self, other: &Self) -> Self {
        let mut both = Self {
            required: [self.required.as_slice(), &other.required].concat(),
            additional: match (&self.additional, &other.additional) {
                (Additional::None, _) | (_, Additional::None) => Additional::None,
                (Additional::Of(one), Additional::Of(other)) => {
                    Additional::Of([one.as_slice(), other].concat())
                }
                (Additional::Unspecified, schemas) | (schemas, Additional::Unspecified) => schemas.clone(),
            },
            ..Self::default()
        };
        for Argument { name, .. } in self.arguments.iter().chain(&other.arguments) {
            let known = both.places.contains_key(name);
            if !known && self.may_have(name) && other.may_have(name) {
                both.push(name, [self.schemas(name), other.schemas(name)].concat());
            }
        }
        both
    }

    /// All schemas of an argument.
    fn schemas(&self, name: &str) -> Vec<&'a Value> {
        match (self.places.get(name), &self.additional) {
            (Some(&at), _) => self.arguments[at].schemas.clone(),
            (None, Additional::Of(schemas)) => schemas.clone(),
            (None, Additional::None | Additional::Unspecified) => Vec::new(),
        }
    }

    fn may_have(&self, name: &str) -> bool {
        self.additional != Additional::None || self.places.contains_key(name)
    }

    /// Marks required arguments, adding those without a schema; returns those that are required and forbidden.
    fn complete(&mut self) -> Vec<String> {
        let mut impossible = Vec::new();
        for name in std::mem::take(&mut self.required) {
            if !self.may_have(name) {
                impossible.push(format!("`required` ({name} is not allowed)"));
                continue;
            }
            if !self.places.contains_key(name) {
                self.push(name, self.schemas(name));
            }
            self.arguments[self.places[name]].is_required = true;
        }
        impossible
    }
}

/// Which of a function's arguments are strings.
#[derive(Debug, Default)]
pub(super) struct Signature {
    /// Arguments by name; true for strings.
    known: HashMap<String, bool>,
    /// All others are strings.
    additional_is_text: bool,
}

impl Signature {
    /// Of the function `name`; all arguments of an unknown function are strings.
    pub(super) fn of(name: &str, functions: &[Function]) -> Self {
        let empty = Map::new();
        let function = functions.iter().find(|function| function.name == name);
        let parameters = Parameters::of(function.map_or(&empty, |function| &function.parameters));
        let names = parameters.objects.iter().flat_map(|object| object.places.keys());
        let names: HashSet<&str> = names.copied().collect();
        Self {
            known: names
                .into_iter()
                .map(|name| (name.to_owned(), parameters.is_text(name)))
                .collect(),
            additional_is_text: parameters.additional_is_text(),
        }
    }

    pub(super) fn is_text(&self, name: &str) -> bool {
        self.known.get(name).copied().unwrap_or(self.additional_is_text)
    }

    /// Whether `text` followed by `c` is a prefix of some argument's name.
    pub(super) fn knows_beginning(&self, text: &str, c: char) -> bool {
        let mut names = self.known.keys();
        names.any(|name| name.strip_prefix(text).is_some_and(|rest| rest.starts_with(c)))
    }
}
