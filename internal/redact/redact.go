// Package redact removes literal secret values from text and byte streams.
package redact

// Redactor knows a set of secret values. It is safe for concurrent use.
type Redactor struct{}
