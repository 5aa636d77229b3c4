-- Raises one typed refusal: an SQLSTATE of class ZF, the field or fence part as COLUMN, what to do as HINT.
CREATE OR REPLACE FUNCTION fencepost._refuse(p_code text, p_message text, p_field text, p_hint text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = p_code, MESSAGE = p_message, COLUMN = coalesce(p_field, ''), HINT = coalesce(p_hint, '');
END $$;

-- Refuses an identity that is null, empty, too long, padded, or holds a control character; names the field.
CREATE OR REPLACE FUNCTION fencepost._require_identity(p_field text, p_value text)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_value IS NULL OR p_value = '' THEN
        PERFORM fencepost._refuse('ZF003', p_field || ' is empty', p_field, 'give a value of 1 to 200 characters');
    ELSIF length(p_value) > 200 THEN
        PERFORM fencepost._refuse('ZF003', p_field || ' is longer than 200 characters', p_field, 'give a shorter value');
    ELSIF p_value ~ '[\u0001-\u001f\u007f-\u009f\ufdd0-\ufdef\ufffe\uffff]' THEN
        PERFORM fencepost._refuse('ZF003', p_field || ' holds a control character or a noncharacter', p_field, 'remove it');
    ELSIF p_value ~ '^[ \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]|[ \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]$' THEN
        PERFORM fencepost._refuse('ZF003', p_field || ' begins or ends with white space', p_field, 'trim it');
    END IF;
END $$;
